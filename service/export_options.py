"""Options of an export in the form in which people type them."""

from collections.abc import Mapping
from typing import Any, Final

from cairn.counts import count_text

_DEFAULTS: Final = {"format": "huggingface", "max_shard_bytes": 5_000_000_000, "lora": "merge"}
_UNITS: Final = {
    **{"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3},
    **{"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10},
}


def typed_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of an artifact that are not the defaults, named as in a query.

    Args:
        options: Options of the artifact, as its record has them.
    """
    typed = {}
    for name, option in options.items():
        if option is None or option == _DEFAULTS.get(name):
            continue
        if name == "max_shard_bytes":
            typed["max_shard_size"] = _typed_size(option)
        elif option is True:
            typed[name] = "true"
        elif isinstance(option, Mapping):  # a trainer's config, which may have hundreds of entries
            typed[name] = count_text(len(option), "key")
        elif isinstance(option, list):
            typed[name] = ",".join(map(str, option))
        else:
            typed[name] = str(option)
    return typed


def has_permanent_address(options: Mapping[str, Any]) -> bool:
    """Return True unless the export was made with what no query names: a config, or logits."""
    return not {"config", "reference_logits"} & typed_options(options).keys()


def options_text(options: Mapping[str, Any]) -> str:
    """Return the options of an artifact in one line: `format=gguf dtype=q8_0`."""
    typed = typed_options(options).items()
    return " ".join(f"{name}={option}" for name, option in typed) or "default options"


def _typed_size(size: int) -> str:
    """Return a size in the largest unit that leaves a whole number: `5GB`, `512MiB`."""
    counts = ((size // unit, name) for name, unit in _UNITS.items() if size % unit == 0)
    count, name = min(counts, default=(size, ""))
    return f"{count}{name}"
