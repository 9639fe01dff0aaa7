"""SmolLM3: one of four layers has no rotary positions; the others may have a window.

Source: transformers `SmolLM3Config`, `SmolLM3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import FULL, WINDOW, DecoderConfig
from cairn.interop.errors import ConfigError
from cairn.interop.families.config_form import ConfigForm, usual_options, windows_from_hf
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm
from cairn.interop.families.gguf_names import ROTARY_PAIRS, gguf_names
from cairn.interop.families.key_kinds import COUNT, INTEGERS
from cairn.interop.families.names import Names

_INTERVAL = 4


def _without_rope(data: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the numbers of the layers without rotary positions.

    Raises:
        ConfigError: the keys that list them are missing or wrong.
    """
    turning, interval = data.get("no_rope_layers"), data.get("no_rope_layer_interval", _INTERVAL)
    if turning is None and isinstance(interval, int) and interval > 0:
        return tuple(range(interval - 1, count, interval))
    listed = turning if isinstance(turning, list | tuple) else ()
    if len(listed) < count or any(flag not in (0, 1) for flag in listed):
        raise ConfigError(
            path=f"config.json of a {data['model_type']!r} model",
            expected=f"no_rope_layers with 0 or 1 for each of the num_hidden_layers={count}, or an "
            "interval",
            found=f"no_rope_layers={turning!r}, no_rope_layer_interval={interval!r}",
            next_step="correct one of them",
        )
    return tuple(number for number, turns in enumerate(listed[:count]) if not turns)


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    count = options["num_hidden_layers"]
    still = _without_rope(data, count)
    window = data.get("sliding_window") if data.get("use_sliding_window") else None
    windowed = windows_from_hf(data, options, lambda layer: window is not None and layer in still)
    types = windowed["layer_types"]
    if WINDOW in types and window is None:
        raise ConfigError(
            path=f"config.json of a {data['model_type']!r} model",
            expected=f"use_sliding_window and a sliding_window for layers of {WINDOW}",
            found=f"use_sliding_window={data.get('use_sliding_window')!r}, "
            f"sliding_window={data.get('sliding_window')!r}",
            next_step="say what the model was trained with; transformers' own attentions differ",
        )
    return {
        "attention_out_bias": options["attention_bias"],
        "layer_types": types,
        "layers_without_rope": still,
        "sliding_window": window if WINDOW in types else None,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    numbers = range(config.num_hidden_layers)
    return {
        "layer_types": list(config.layer_types or (FULL,) * config.num_hidden_layers),
        "no_rope_layers": [int(number not in config.layers_without_rope) for number in numbers],
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    }


FAMILY = Family(
    ConfigForm(
        "smollm3",
        "SmolLM3ForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            mlp_bias=("mlp_bias", False),
            num_key_value_heads=("num_key_value_heads", 4),
            tie_word_embeddings=("tie_word_embeddings", True),
        ),
        carried=frozenset({"max_window_layers", "pretraining_tp"}),
        rope_theta=2000000.0,
        also_read=frozenset(
            {
                *("layer_types", "no_rope_layer_interval", "no_rope_layers", "sliding_window"),
                "use_sliding_window",
            }
        ),
        read=_read,
        write=_write,
        nulls=frozenset({"num_key_value_heads"}),
        kinds={"no_rope_layer_interval": COUNT, "no_rope_layers": INTEGERS},
    ),
    Names(),
    # llama.cpp has no other interval, and neither biases nor windows.
    GGUFForm(
        "smollm3",
        gguf_names(ops=ROTARY_PAIRS),
        fixed={"no_rope_layer_interval": _INTERVAL},
        engine=Engine(wide_heads=True),
    ),
)
