"""What must be installed beside Cairn, and what to do where it is missing, too old or too new.

`pyproject.toml` says which versions are supported; an installation carries that with it. `TESTED`
says beyond which versions training warns, where no version is too new to be supported.
"""

import logging
from importlib import metadata
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

__all__ = [
    "InstallationError",
    "check_versions",
    "installed_version",
    "missing_extra",
    "untested_versions",
    "wrong_versions",
]

DISTRIBUTION: Final = "cairn-checkpoints"
logger = logging.getLogger("cairn.installation")

MODULES: Final = {
    "store": (
        "backports",
        "fsspec",
        "gcsfs",
        "google_crc32c",
        "ml_dtypes",
        "numpy",
        "tensorstore",
        "xxhash",
    ),
    "server": (
        "alembic",
        "croniter",
        "dbos",
        "fastapi",
        "jinja2",
        "jwt",
        "prometheus_client",
        "sqlalchemy",
        "uvicorn",
    ),
    "otel": ("opentelemetry",),
    "train": (
        "flax",
        "huggingface_hub",
        "jax",
        "jaxlib",
        "jaxtyping",
        "optax",
        "orbax",
        "prometheus_client",
        "qwix",
    ),
}
"""Extra -> the modules that it brings."""

ROOMS: Final = {
    "service": "server",
    "state": "train",
    "interop": "store",
    "storage": "store",
}
"""Package -> the extra that it needs."""

CHECKED: Final = frozenset(
    ("flax", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "qwix", "tensorstore")
)
"""What training checks the versions of: a save that goes wrong is found out late."""

TESTED: Final = {"flax": "<0.13", "jax": "<0.13", "jaxlib": "<0.13", "optax": "<0.3"}
"""Of `CHECKED`, what has no upper bound in `pyproject.toml` -> the versions that were tested.

Training warns of newer ones. Raise a bound once the newest leg of `make matrix` passes with more.
"""


class InstallationError(ImportError):
    """A package that is missing, or of a version that this one was never tested with."""


def installed_version() -> str:
    """Return the version of this Cairn; "0" of a source tree that was never installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0"


def missing_extra(
    error: ModuleNotFoundError, *, used: str, room: str = ""
) -> InstallationError | None:
    """Return what to install for a missing module; None if no extra brings it.

    Args:
        error: of the import.
        used: what was asked for, as the user wrote it.
        room: the part of Cairn that has it, such as `state.checkpointing.checkpointer`.
    """
    module = (error.name or "").partition(".")[0]
    brought_by = [extra for extra, modules in MODULES.items() if module in modules]
    if not brought_by:
        return None
    needed = [extra for part, extra in ROOMS.items() if f"{room}.".startswith(f"{part}.")]
    extra = (needed or brought_by)[0]
    return InstallationError(
        f"{used}: expected the extra `{extra}`, found no module `{module}`. "
        f"Install it: pip install '{DISTRIBUTION}[{extra}]'",
        name=module,
    )


def wrong_versions() -> list[tuple[Requirement, str]]:
    """Return installed packages, required for training, whose versions are not supported.

    A source tree that was never installed has no ranges.
    """
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    wrong = []
    for requirement in map(Requirement, requirements):
        if requirement.name not in CHECKED:
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue  # importing it says so
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append((requirement, version))
    return wrong


def untested_versions() -> list[tuple[Requirement, str]]:
    """List what is installed in a newer version than was tested, and is supported all the same."""
    untested = []
    for name, versions in TESTED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not SpecifierSet(versions).contains(version, prereleases=True):
            untested.append((Requirement(f"{name}{versions}"), version))
    return untested


def check_versions() -> None:
    """Refuse to train with packages whose versions are outside of the supported ranges.

    Those that are newer than what was tested are named in one warning. A source tree that was never
    installed has no ranges; then nothing is refused.

    Raises:
        InstallationError: every package that is too old or too new.
    """
    if wrong := wrong_versions():
        raise InstallationError(
            f"cairn {installed_version()} cannot train here: {_differences(wrong)}. "
            f"Install supported versions: {_installing(wrong)}"
        )
    if untested := untested_versions():
        logger.warning(
            "cairn %s was not tested with versions that are installed here: %s. Try a save and a "
            "restore before you rely on them, or install tested versions: %s",
            installed_version(),
            _differences(untested),
            _installing(untested),
        )


def _differences(others: list[tuple[Requirement, str]]) -> str:
    return "; ".join(
        f"expected {requirement.name} {requirement.specifier}, found {version}"
        for requirement, version in others
    )


def _installing(others: list[tuple[Requirement, str]]) -> str:
    mended = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in others)
    return f"pip install {mended}"
