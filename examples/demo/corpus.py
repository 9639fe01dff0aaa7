"""Training text of the demo: this repository's own documents, tokenized, in one fixed order."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPOSITORY = Path(__file__).resolve().parents[2]


def documents(repository: Path = REPOSITORY) -> str:
    """Returns the repository's Markdown files, joined in path order."""
    paths = [repository / "README.md", *sorted((repository / "docs").rglob("*.md"))]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)


class Batches:
    """Batches by position: batch `n` is the same for every process that asks for it.

    The position is all a job has to store to go on where it stopped (`extras` of `save_state`).
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, batch: int, length: int) -> None:
        ids = tokenizer(documents(), verbose=False)["input_ids"]
        rows = len(ids) // length
        self._rows = np.asarray(ids[: rows * length], dtype=np.int32).reshape(rows, length)
        self._batch = batch

    def __getitem__(self, position: int) -> np.ndarray:
        """Returns batch `position`, int32 [batch, length]; the text repeats when it ends."""
        first = position * self._batch
        return self._rows[(first + np.arange(self._batch)) % len(self._rows)]
