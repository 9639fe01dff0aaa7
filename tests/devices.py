"""How the tests' programs see this machine: as several devices, and compiled quickly."""

from pathlib import Path

COMPILED = Path(__file__).parents[1] / ".cache" / "jax"
"""The folder of what XLA has compiled, kept from run to run."""

THREADS = "32"
"""For `PJRT_NPROC`: threads of XLA's pool. Collectives of one step may run side by side, and each
holds a thread per device until all devices have come: the 8 threads that a small machine gets for
8 virtual devices can all be held, and XLA ends a process that waits for 40 s."""


def xla_flags(devices: int) -> str:
    """The flags of XLA for so many virtual devices.

    Programs are compiled without LLVM's optimizations and by XLA's older way of fusing loops, in a
    third of the time: what these add is not what is tested. The demo, the examples and the
    documentation's code choose flags of their own.
    """
    options = {
        "force_host_platform_device_count": devices,
        "backend_optimization_level": 0,
        "cpu_use_fusion_emitters": "false",
    }
    return " ".join(f"--xla_{name}={value}" for name, value in options.items())
