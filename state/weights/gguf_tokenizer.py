"""A tokenizer.json as a GGUF file holds it: byte-level BPE, of the kinds whose name is known.

llama.cpp cuts text before merging by rules that it knows by name; a file says the name. A tokenizer
whose rules have none here is left out, with the reason. JAX-free.

Source: llama.cpp's converter (`tokenizer.ggml.*`); the format of the `tokenizers` package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["tokenizer_metadata"]

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: Final[Mapping[str, str]] = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}


def tokenizer_metadata(assets: Mapping[str, bytes], rows: int) -> tuple[dict[str, Any], str | None]:
    """The keys of a file, and why there are none.

    Args:
        assets: small files of a model, by name.
        rows: of its embedding; those beyond the vocabulary are unused tokens.
    """
    raw = assets.get("tokenizer.json")
    if raw is None:
        return {}, "the step has no tokenizer.json"
    try:
        data = json.loads(raw)
        model = data["model"]
        name = _splitting(data)
        if model.get("type") != "BPE" or name is None:
            return {}, "its tokenizer is no byte-level BPE of a kind that is known here"
        vocabulary: dict[int, str] = {number: text for text, number in model["vocab"].items()}
        kinds = dict.fromkeys(vocabulary, _NORMAL)
        for added in data.get("added_tokens") or ():
            vocabulary[added["id"]] = added["content"]
            kinds[added["id"]] = _CONTROL if added["special"] else _USER
        merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
        if any(number >= rows for number in vocabulary):
            return {}, f"its tokenizer has more tokens than the embedding's {rows} rows"
        template = _template(assets)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        return {}, f"its tokenizer files can't be read ({type(exc).__name__}: {exc})"
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [
            vocabulary.get(number, f"[PAD{number}]") for number in range(rows)
        ],
        "tokenizer.ggml.token_type": [kinds.get(number, _UNUSED) for number in range(rows)],
        "tokenizer.ggml.merges": merges,
    }
    return found | ({} if template is None else {"tokenizer.chat_template": template}), None


def _splitting(data: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of how a text is cut; None: it has none that is known here."""
    rules = data.get("pre_tokenizer") or {}
    steps = rules.get("pretokenizers", [rules]) if rules.get("type") == "Sequence" else [rules]
    kinds = [step.get("type") for step in steps]
    if data.get("normalizer") not in (None, {"type": "NFC"}) or "ByteLevel" not in kinds:
        return None
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return _SPLITS.get((steps[0].get("pattern") or {}).get("Regex", ""))
    return None


def _template(assets: Mapping[str, bytes]) -> str | None:
    if "chat_template.jinja" in assets:
        return assets["chat_template.jinja"].decode()
    config = json.loads(assets.get("tokenizer_config.json", b"{}"))
    template = config.get("chat_template")
    return template if isinstance(template, str) else None
