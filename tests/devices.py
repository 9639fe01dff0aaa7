"""How the tests' programs see this machine: as several devices, and compiled quickly."""

from pathlib import Path

COMPILED = Path(__file__).parents[1] / ".cache" / "jax"
"""The folder of what XLA has compiled, kept from run to run."""

THREADS = "32"
"""For `PJRT_NPROC`: threads of XLA's pool. Collectives of one step may run side by side, and each
holds a thread per device until all devices have come: the 8 threads that a small machine gets for
8 virtual devices can all be held, and XLA ends a process that waits for 40 s."""


def xla_flags(devices: int | None = None) -> str:
    """The flags of XLA for so many virtual devices, or for as many as a program chooses itself.

    Programs are compiled without LLVM's optimizations, by XLA's older way of fusing loops, and in
    one piece, which takes a quarter less than many small ones, and in all a fourth of the time.
    What they are compiled to is not what is tested. The demo and the examples, and pages that set
    XLA_FLAGS themselves, are compiled as ever.
    """
    options = {
        "force_host_platform_device_count": devices,
        "backend_optimization_level": 0,
        "cpu_parallel_codegen_split_count": 1,
        "cpu_use_fusion_emitters": "false",
    }
    if devices is None:
        del options["force_host_platform_device_count"]
    return " ".join(f"--xla_{name}={value}" for name, value in options.items())
