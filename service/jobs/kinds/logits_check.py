"""Comparison of an export's logits with those of its checkpoint, for the same tokens.

The two models run one after the other, each in a process of its own. So the worker loads no array
framework, and the models' memory is free again afterwards.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cairn.interop.config.decoder import DecoderConfig
from cairn.service.errors import InvalidRequestError
from cairn.service.jobs.context import JobContext
from cairn.storage.errors import CorruptionError
from cairn.storage.store.disk.confinement import check_tree
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, parse_uri

REPORT_FILE: Final = "logits_check.json"
TOLERANCE: Final = 1e-4
"""Largest accepted difference between two logits, relative to the largest logit."""

_PACKAGES: Final = ("jax", "flax", "torch", "transformers")
_SEQUENCES: Final = 2
_TOKENS: Final = 64
_BEYOND_WINDOW: Final = 16
_MOST_TOKENS: Final = 512
_POLL_SECONDS: Final = 0.1
# Extra tolerance, in roundings of the dtype: adapters are merged and weights dequantized in another
# order of operations, so in a dtype of few bits the weights may differ by one rounding.
_ROUNDINGS: Final = 8.0
_EPSILONS: Final = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def check_installed() -> None:
    """Check that this worker can run both models.

    Raises:
        InvalidRequestError: Packages are missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidRequestError(
            f"check_logits: expected {', '.join(_PACKAGES)} where the worker runs, found no "
            f"{', '.join(missing)}; install cairn-checkpoints[train,torch] there, or leave it out"
        )


@dataclass(frozen=True)
class LogitsCheck:
    """Checkpoint and export to compare.

    Attributes:
        checkpoint: URI of the stored step.
        export: Folder of the written files.
        config: Configuration of the model.
        dtype: Dtype that the export's weights were cast to; None: they were not cast.
    """

    checkpoint: StoreURI
    export: StoreURI
    config: DecoderConfig
    dtype: str | None

    def report(self, context: JobContext) -> dict[str, Any]:
        """Run both models, compare their logits, and return the result for the report.

        Raises:
            CorruptionError: The logits differ.
            InvalidRequestError: A model does not run here.
            JobInterrupt: The operation was cancelled or the process is stopping.
        """
        with tempfile.TemporaryDirectory(prefix="cairn-logits-") as name:
            work = Path(name)
            tokens = fixed_tokens(self.config)
            np.save(work / "tokens.npy", tokens)
            context.progress.set(message="computing the checkpoint's logits")
            checkpoint_run = self._run(
                context,
                "cairn.state.models.stored_logits",
                [str(self.checkpoint), "tokens.npy", "ours.npy", self.dtype or "native"],
                work,
            )
            context.progress.set(message="computing the export's logits")
            folder = self._local_folder(context, work / "export")
            export_run = self._run(
                context,
                "cairn.state.models.exported_logits",
                [str(folder), "tokens.npy", "theirs.npy"],
                work,
            )
            if export_run["problems"]:
                raise self._failure(
                    "transformers has other tensors than the export",
                    "each tensor of the model once",
                    "; ".join(export_run["problems"][:5]),
                )
            logits = np.load(work / "theirs.npy"), np.load(work / "ours.npy")
        if logits[0].shape != logits[1].shape:
            raise self._failure(
                "the logits have other shapes", str(logits[1].shape), str(logits[0].shape)
            )
        compared = compare(*logits)
        tolerance = TOLERANCE
        if checkpoint_run["adapted"]:
            tolerance += _ROUNDINGS * _EPSILONS.get(str(self.dtype), 0.0)
        if not compared["relative_difference"] <= tolerance:  # with `not`, so that NaN fails
            raise self._failure(
                "the export does not compute what the checkpoint does",
                f"logits within {tolerance:g} of the largest one",
                f"{compared['largest_difference']:g} beside {compared['largest_logit']:g}",
            )
        return {
            "checkpoint": {"logits": checkpoint_run["computed_by"]},
            "export": {"logits": export_run["computed_by"]},
            "tokens": tokens.tolist(),
            "tolerance": tolerance,
            **compared,
        }

    def _run(
        self, context: JobContext, module: str, arguments: list[str], work: Path
    ) -> dict[str, Any]:
        command = [sys.executable, "-m", module, *arguments]
        variables = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        with (work / "answer").open("w+b") as answer, (work / "errors").open("w+b") as errors:
            with subprocess.Popen(
                command,
                cwd=work,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,  # closes when this process dies, which ends the child
                stdout=answer,
                stderr=errors,
            ) as process:
                try:
                    while process.poll() is None:
                        context.check()
                        time.sleep(_POLL_SECONDS)
                except BaseException:
                    process.kill()
                    raise
            if process.returncode:
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines() or ["nothing"]
                raise InvalidRequestError(
                    f"check_logits: expected {module} to compute logits of {arguments[0]}, found "
                    f"exit status {process.returncode}: {lines[-1][:500]}. It holds the model in "
                    "float32. Mend what it says, or leave check_logits out."
                )
            answer.seek(0)
            said: dict[str, Any] = json.loads(answer.read().splitlines()[-1])
            return said

    def _local_folder(self, context: JobContext, copy: Path) -> Path:
        """Return the export as a local folder; copy it from a bucket if needed."""
        if self.export.scheme == "file":
            check_tree(self.export)
            return Path(self.export.local_path)
        files = open_files(self.export)
        target = open_files(parse_uri(copy))
        for entry in files.list():
            context.check()
            files.copy(entry.name, target, entry.name)
        return copy

    def _failure(self, what: str, expected: str, found: str) -> CorruptionError:
        return CorruptionError(
            f"check_logits: {what}",
            path=self.export,
            expected=expected,
            found=found,
            next_step="Verify the checkpoint (cairn verify). If it is sound, convert it without "
            "check_logits, compare the two yourself, and report what you find.",
        )


def fixed_tokens(config: DecoderConfig) -> np.ndarray:
    """Return tokens [B, T], longer than a short sliding window, and equal for equal configs."""
    length = max(_TOKENS, (config.sliding_window or 0) + _BEYOND_WINDOW)
    length = min(length, _MOST_TOKENS, config.max_position_embeddings)
    numbers = np.random.default_rng(0)
    return numbers.integers(0, config.vocab_size, (_SEQUENCES, length), dtype=np.int64)


def compare(logits: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return the largest logit, the differences and the share of equal next tokens.

    Args:
        logits: Logits [B, T, V] of the export.
        expected: Logits [B, T, V] of the checkpoint.
    """
    largest = float(np.max(np.abs(expected)))
    difference = float(np.max(np.abs(logits - expected)))
    same = np.argmax(logits, axis=-1) == np.argmax(expected, axis=-1)
    return {
        "largest_logit": largest,
        "largest_difference": difference,
        "relative_difference": difference / largest if largest else difference,
        "same_next_token": float(np.mean(same)),
    }
