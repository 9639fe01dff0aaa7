"""Conversion of byte-level BPE tokenizers between tokenizer.json and GGUF metadata.

Before merging, llama.cpp splits text by rules whose name is in the file. A tokenizer with other
rules is left out of a GGUF file, with the reason.

Source: llama.cpp's converter (`tokenizer.ggml.*`); the format of the `tokenizers` package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["NO_TOKENIZER", "NO_TOKENIZER_KINDS", "as_it_cuts", "tokenizer_metadata"]

NO_TOKENIZER: Final[Mapping[str, Any]] = {"tokenizer.ggml.model": "none"}
"""Metadata of a file without a tokenizer; llama.cpp does not load a file that lacks the key."""
NO_TOKENIZER_KINDS: Final = ("none", "no_vocab")
"""Values of that key that llama.cpp reads as "no tokenizer"."""
_COMPOSES: Final = (
    "it composes characters first (NFC), which llama.cpp does not: text whose accents are "
    "characters of their own has other tokens there"
)
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: Final[Mapping[str, str]] = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}
_AS_THEY_ARE: Final = "llama-bpe"
"""Splitting rules with `ignore_merges`: a word that is a token is not merged from parts."""
_BYTES: Final[Mapping[str, Any]] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_DIGITS: Final = {"type": "Digits", "individual_digits": True}
_OWN_RULES: Final = frozenset(
    {
        *("a.x-4.0", "gigachat", "gpt-2", "granite-docling", "jais", "jina-de", "jina-es"),
        *("jina-v2-de", "jina-v2-es", "mellum", "mpt", "olmo", "phi-2", "trillion"),
    }
)
"""Names of splitting rules that are the same as GPT-2's."""
_DIGITS_APART: Final = frozenset(
    {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
)
_LLAMA3: Final = frozenset({"falcon3", "llama-bpe", "llama-v3", "llama3"})


def tokenizer_metadata(assets: Mapping[str, bytes], rows: int) -> tuple[dict[str, Any], str | None]:
    """Return the metadata keys of a tokenizer, and a note or None.

    Without a tokenizer that a file can hold there are no keys, and the note says why. Otherwise the
    note names a difference to llama.cpp, if there is one.

    Args:
        assets: contents of the model's small files, by name.
        rows: number of rows of the embedding; rows beyond the vocabulary become unused tokens.
    """
    try:
        return _keys(assets, rows)
    except _LeftOutError as exc:
        return {}, f"left out: {exc}"


class _LeftOutError(Exception):
    """Reason why the tokenizer is left out of a file."""


def _keys(assets: Mapping[str, bytes], rows: int) -> tuple[dict[str, Any], str | None]:
    raw = assets.get("tokenizer.json")
    if raw is None:
        raise _LeftOutError("the step has no tokenizer.json")
    try:
        data = json.loads(raw)
        model = data["model"]
        name = _splitting(data)
        if model.get("type") != "BPE" or name is None:
            raise _LeftOutError("its tokenizer is no byte-level BPE of a kind that is known here")
        vocabulary: dict[int, str] = {number: text for text, number in model["vocab"].items()}
        kinds = dict.fromkeys(vocabulary, _NORMAL)
        for added in data.get("added_tokens") or ():
            vocabulary[added["id"]] = added["content"]
            kinds[added["id"]] = _CONTROL if added["special"] else _USER
        problem, adds = _added_around(data)
        problem = problem or _unlike_in_a_text(data)
        if problem is not None:
            raise _LeftOutError(problem)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        if any(number >= rows for number in vocabulary):
            raise _LeftOutError(f"its tokenizer has more tokens than the embedding's {rows} rows")
        templates = _templates(assets)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        problem = f"its tokenizer files can't be read ({type(exc).__name__}: {exc})"
        raise _LeftOutError(problem) from exc
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [
            vocabulary.get(number, f"[PAD{number}]") for number in range(rows)
        ],
        "tokenizer.ggml.token_type": [kinds.get(number, _UNUSED) for number in range(rows)],
        "tokenizer.ggml.merges": merges,
    }
    return keys | adds | templates, None if data.get("normalizer") is None else _COMPOSES


def as_it_cuts(tokenizer: bytes, name: str | None, begin: str | None = None) -> bytes | None:
    """Return a tokenizer.json, made from a GGUF file, corrected to split text as the file says.

    transformers, which made it, knows few names of splitting rules and uses GPT-2's for others.

    Args:
        tokenizer: content of tokenizer.json as transformers made it.
        name: the file's name of its splitting rules; None in old files, which lack it.
        begin: the token that begins a text; it is added with Llama 3's rules. None: the file says
            whether it is added.

    Returns:
        The content of tokenizer.json; None if the rules are unknown.
    """
    data = json.loads(tokenizer)
    if name in _LLAMA3:
        data["model"]["ignore_merges"] = True
        if begin is not None:
            data["post_processor"] = _beginning(data, begin)
    elif name in _DIGITS_APART:
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [_DIGITS, dict(_BYTES)]}
    elif name is not None and name not in _OWN_RULES and _splitting(data) == "gpt-2":
        return None
    return json.dumps(data, ensure_ascii=False, indent=2).encode()


def _beginning(data: Mapping[str, Any], begin: str) -> dict[str, Any]:
    added = {token["content"]: token["id"] for token in data.get("added_tokens") or ()}
    number = added[begin] if begin in added else data["model"]["vocab"][begin]
    first = {"SpecialToken": {"id": begin, "type_id": 0}}
    text, pair = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"SpecialToken": {"id": begin, "type_id": 1}}, pair],
        "special_tokens": {begin: {"id": begin, "ids": [number], "tokens": [begin]}},
    }


def _added_around(data: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return metadata keys for the tokens that a tokenizer adds around a text.

    The first item is None, or the reason why a file can't express them. The keys are always
    written, since llama.cpp's defaults depend on the splitting rules. Only tokenizer.json counts,
    as in transformers, whatever `add_bos_token` in tokenizer_config.json says.
    """
    steps = data.get("post_processor") or {}
    steps = steps.get("processors", [steps]) if steps.get("type") == "Sequence" else [steps]
    kinds = [step.get("type") for step in steps]
    if set(kinds) - {None, "ByteLevel", "TemplateProcessing"}:
        return "its tokenizer adds tokens to a text in a way that no file can say", {}
    first: list[int] = []
    for step in steps:
        if step.get("type") == "TemplateProcessing":
            special = {name: token_ids["ids"] for name, token_ids in step["special_tokens"].items()}
            ids = [
                special[part["SpecialToken"]["id"]] if "SpecialToken" in part else None
                for part in step["single"]
            ]
            at = ids.index(None)
            first += [number for token_ids in ids[:at] for number in token_ids or ()]
            if ids[at + 1 :] or len(first) > 1:
                return "its tokenizer adds more to a text than one token before it", {}
    begin = {"tokenizer.ggml.bos_token_id": first[0]} if first else {}
    return None, {"tokenizer.ggml.add_bos_token": bool(first), **begin}


def _unlike_in_a_text(data: Mapping[str, Any]) -> str | None:
    """Return why llama.cpp would find other added tokens in a text; None if it finds the same.

    llama.cpp matches a token's exact text, the longest tokens first.
    """
    added = data.get("added_tokens") or ()
    for token in added:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            return (
                f"its added token {token['content']!r} takes white space with it, or stands for a "
                "single word alone, which no file can say"
            )
    # Overlaps of tokens that repeat one character are harmless: both find the longest first.
    texts = sorted((token["content"] for token in added), key=lambda text: len({*text}))
    begins = {text[:size]: text for text in texts for size in range(1, len(text))}
    for text in texts:
        for start in range(1, len(text)):
            other = begins.get(text[start:])
            if other is not None and len({*text, *other}) > 1:
                return (
                    f"its added tokens {text!r} and {other!r} may overlap in a text, and llama.cpp "
                    "takes the longer of them, not the first"
                )
    return None


def _splitting(data: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of the splitting rules; None if they are unknown here."""
    rules = data.get("pre_tokenizer") or {}
    steps = rules.get("pretokenizers", [rules]) if rules.get("type") == "Sequence" else [rules]
    kinds = [step.get("type") for step in steps]
    model = data["model"]
    if data.get("normalizer") not in (None, {"type": "NFC"}) or "ByteLevel" not in kinds:
        return None
    if any(step.get("add_prefix_space") for step in steps) or model.get("end_of_word_suffix"):
        return None
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        name = _SPLITS.get((steps[0].get("pattern") or {}).get("Regex", ""))
        return name if bool(model.get("ignore_merges")) == (name == _AS_THEY_ARE) else None
    return None


def _templates(assets: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the metadata keys of the chat template, and of additional named ones."""
    templates = json.loads(assets.get("tokenizer_config.json", b"{}")).get("chat_template")
    if "chat_template.jinja" in assets:
        templates = assets["chat_template.jinja"].decode()
    if not isinstance(templates, list):
        return {"tokenizer.chat_template": templates} if isinstance(templates, str) else {}
    named = {template["name"]: template["template"] for template in templates}
    usual = {"tokenizer.chat_template": named.pop("default")} if "default" in named else {}
    others = {f"tokenizer.chat_template.{name}": template for name, template in named.items()}
    return usual | ({"tokenizer.chat_templates": list(named), **others} if named else {})
