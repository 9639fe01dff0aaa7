"""Folders that older releases of EasyDeL saved: safetensors weights, named like our leaves.

The folder also has the optimizer's tensors, named by numbers, and a pickle that describes them.
That pickle can run code and is never read, so the optimizer state is not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cairn.interop.config.auto import AutoEasyDeLConfig
from cairn.interop.config.decoder import OURS_ALONE
from cairn.interop.config.hf_keys import unread_keys
from cairn.interop.conversion.ops import Shape
from cairn.interop.conversion.rules import Rule, RuleTable

__all__ = ["WEIGHTS_FILE", "easydel_config", "easydel_rules", "unread_files"]

WEIGHTS_FILE: Final = "easydel-model.parameters"

_LEFT: Final = re.compile(r"easydel-optstate\..*|.*\.(structure|pickle|pkl)|tx_structure\.json")
_NORMS: Final = ("kernel", "scale", "weight")
"""Names that EasyDeL has used for the scale of a norm."""


def unread_files(names: Iterable[str]) -> list[str]:
    """Return the names of files that are not read: the optimizer's, and all pickles."""
    return sorted(name for name in names if _LEFT.fullmatch(name))


def easydel_config(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of a config.json that describe the model, and the other keys.

    The others say how EasyDeL ran the model: meshes, block sizes, platforms.
    """
    others = unread_keys(data, AutoEasyDeLConfig.hf_keys(data) | {"architectures", "auto_map"})
    ours_alone = OURS_ALONE & data.keys()
    dropped = others.keys() | ours_alone
    return {key: value for key, value in data.items() if key not in dropped}, sorted(dropped)


def easydel_rules(paths: Iterable[str], shapes: Mapping[str, Shape]) -> RuleTable:
    """Return the rule table between our leaves and EasyDeL's tensors: dots become slashes.

    Args:
        paths: paths of our leaves.
        shapes: shapes of the folder's tensors, by name.
    """
    rules = []
    for path in paths:
        name = path.replace("/", ".")
        owner, _, last = name.rpartition(".")
        if last == "scale":
            names = [f"{owner}.{norm}" for norm in _NORMS if f"{owner}.{norm}" in shapes]
            name = names[0] if names else f"{owner}.{_NORMS[0]}"
        rules.append(Rule.one(path, name))
    return RuleTable(tuple(rules))
