"""How the tests' programs see this machine: as several devices, and compiled quickly."""

from importlib import metadata
from pathlib import Path

from packaging.version import Version

COMPILED = Path(__file__).parents[1] / ".cache" / "jax"
"""The folder of what XLA has compiled, kept from run to run."""

THREADS = "32"
"""For `PJRT_NPROC`: threads of XLA's pool. Collectives of one step may run side by side, and each
holds a thread per device until all devices have come: the 8 threads that a small machine gets for
8 virtual devices can all be held, and XLA ends a process that waits for 40 s."""


QUICKLY = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    # XLA ends a process that names a flag it does not have: jaxlib 0.11 has no older way of fusing.
    *(
        ["--xla_cpu_use_fusion_emitters=false"]
        if Version(metadata.version("jaxlib")) < Version("0.11")
        else []
    ),
)
"""How programs are compiled: without LLVM's optimizations, by XLA's older way of fusing loops, and
in one piece, which takes a quarter less than many small ones, and in all a fourth of the time. What
they are compiled to is not what is tested. Forked programs are compiled so, those too that set
XLA_FLAGS themselves; what is started afresh (the README, the demo, Jupyter) is as ever."""


def xla_flags(devices: int | None = None) -> str:
    """The flags of XLA for so many virtual devices, or for as many as a program chooses itself."""
    count = [] if devices is None else [f"--xla_force_host_platform_device_count={devices}"]
    return " ".join([*count, *QUICKLY])
