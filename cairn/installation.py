"""Checks of the packages that Cairn needs, with errors that say what to install.

The supported version ranges are those of `pyproject.toml`, read from the installed metadata.
`TESTED` has the versions that were tested; training warns of newer ones.
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
        "ml_dtypes",
        "numpy",
        "tensorstore",
        "xxhash",
    ),
    "server": (
        "alembic",
        "authlib",
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
    "s3": ("botocore",),
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
"""Extra -> the top-level modules that it installs."""

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
"""Distributions whose versions are checked before training: a bad save would be noticed late."""

TESTED: Final = {"flax": "<0.13", "jax": "<0.13", "jaxlib": "<0.13", "optax": "<0.3"}
"""Tested versions of those packages in `CHECKED` that have no upper bound in `pyproject.toml`.

Training warns of newer versions. Raise a bound once the newest leg of `make matrix` passes with a
newer version.
"""


class InstallationError(ImportError):
    """A package that Cairn needs is missing, or its version is not supported."""


def installed_version() -> str:
    """Return the installed version of Cairn; "0" if it runs from a source tree, not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0"


def missing_extra(
    error: ModuleNotFoundError, *, used: str, room: str = ""
) -> InstallationError | None:
    """Return an error that says which extra to install; None if no extra installs the module.

    Args:
        error: the error of the failed import.
        used: the name that the user used, such as `cairn.Run`; the message begins with it.
        room: the module of Cairn that defines the name, such as
            `state.checkpointing.checkpointer`; "" if unknown.
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
    """Return the packages of `CHECKED` whose installed version is not supported.

    Each comes with the requirement and the installed version. The list is empty if Cairn runs from
    a source tree, not installed: then no requirements are known.
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
            continue  # its import raises an error that says so
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append((requirement, version))
    return wrong


def untested_versions() -> list[tuple[Requirement, str]]:
    """Return the packages of `TESTED` that are installed in a newer version than was tested.

    Each comes with the tested versions and the installed version.
    """
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
    """Check that the packages that training needs have supported versions.

    If a package is newer than the tested versions, one warning is logged. If Cairn runs from a
    source tree, not installed, no version is refused.

    Raises:
        InstallationError: if a version is not supported; lists all such packages.
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
