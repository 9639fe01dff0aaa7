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
from cairn.interop.trainers.trainer import HeadRounding
from cairn.service.errors import InvalidRequestError
from cairn.service.jobs.context import JobContext
from cairn.service.jobs.kinds.reference_logits import read_reference
from cairn.storage.errors import CorruptionError
from cairn.storage.store.disk.confinement import check_tree
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, parse_uri

REPORT_FILE: Final = "logits_check.json"
UNPROVED: Final = (
    "a mistake in the values that a map makes (an axis, an order of heads or layers, a factor) "
    "cannot be seen without logits of the trainer's own model: give them as reference_logits"
)
TOLERANCE: Final = 1e-4
"""Largest accepted difference between two logits, relative to the largest logit."""

_NEXT_STEP: Final = (
    "Verify the checkpoint (cairn verify). If it is sound, convert it without check_logits, "
    "compare the two yourself, and report what you find."
)
_NEXT_STEP_OF_MAPS: Final = (
    "See that the logits are of this step, in float32, and that the config is the one that the "
    "trainer had: its model's name may decide how rotary positions turn. If so, report it."
)
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
        reference: Address of a file of the trainer's own logits; None: none.
        is_mapped: Another trainer stored the step, whose tree was mapped to the model's leaves.
        head_rounding: How the trainer's own forward pass rounds the head; None: it does not.
        is_renamed: The step is adopted, and the model's leaves are as a map named them.
    """

    checkpoint: StoreURI
    export: StoreURI
    config: DecoderConfig
    dtype: str | None
    reference: str | None = None
    is_mapped: bool = False
    head_rounding: HeadRounding | None = None
    is_renamed: bool = False

    def report(self, context: JobContext) -> dict[str, Any]:
        """Run both models, compare their logits, and return the result for the report.

        Raises:
            CorruptionError: The logits differ.
            InvalidRequestError: A model does not run here.
            JobInterrupt: The operation was cancelled or the process is stopping.
        """
        with tempfile.TemporaryDirectory(prefix="cairn-logits-") as name:
            work = Path(name)
            if self.reference is not None:
                return self._with_reference(context, work, self.reference)
            tokens = fixed_tokens(self.config)
            np.save(work / "tokens.npy", tokens)
            if self.is_mapped:
                exported, logits = self._exported(context, work)
                if not np.isfinite(logits).all():
                    raise self._failure("the export's logits are not finite", "numbers", "others")
                return {
                    "export": {"logits": exported},
                    "tokens": tokens.tolist(),
                    "compared": False,
                    "note": UNPROVED,
                }
            context.progress.set(message="computing the checkpoint's logits")
            checkpoint_run = self._run(
                context,
                "cairn.state.models.stored_logits",
                [str(self.checkpoint), "tokens.npy", "ours.npy", self.dtype or "native"],
                work,
            )
            exported, logits = self._exported(context, work)
            expected = np.load(work / "ours.npy")
        tolerance = TOLERANCE
        if checkpoint_run["adapted"]:
            tolerance += _ROUNDINGS * _EPSILONS.get(str(self.dtype), 0.0)
        compared = self._compared(logits, expected, tolerance, "the checkpoint")
        return {
            "checkpoint": {"logits": checkpoint_run["computed_by"]},
            "export": {"logits": exported},
            "tokens": tokens.tolist(),
            **compared,
            **({"note": UNPROVED} if self.is_renamed else {}),
        }

    def _with_reference(self, context: JobContext, work: Path, file: str) -> dict[str, Any]:
        """Compare the export's logits with those of the trainer; return the report."""
        vocabulary = self.config.vocab_size
        reference = read_reference(self.checkpoint, file, vocabulary, work)
        np.save(work / "tokens.npy", reference.tokens)
        rounding = self.head_rounding
        exported, logits = self._exported(context, work, rounding)
        tolerance = TOLERANCE + _ROUNDINGS * _EPSILONS.get(str(self.dtype), 0.0)
        compared = self._compared(logits, reference.logits, tolerance, "the trainer's model")
        return {
            "reference": {"file": file, "head_dtype": rounding and rounding.dtype},
            "export": {"logits": exported},
            "tokens": reference.tokens.tolist(),
            **compared,
        }

    def _exported(
        self, context: JobContext, work: Path, rounding: HeadRounding | None = None
    ) -> tuple[str, np.ndarray]:
        """Return by what the export's logits were computed, and the logits."""
        context.progress.set(message="computing the export's logits")
        folder = self._local_folder(context, work / "export")
        export_run = self._run(
            context,
            "cairn.state.models.exported_logits",
            [str(folder), "tokens.npy", "theirs.npy", *map(str, rounding or ())],
            work,
        )
        if export_run["problems"]:
            raise self._failure(
                "transformers has other tensors than the export",
                "each tensor of the model once",
                "; ".join(export_run["problems"][:5]),
            )
        return export_run["computed_by"], np.load(work / "theirs.npy")

    def _compared(
        self, logits: np.ndarray, expected: np.ndarray, tolerance: float, by: str
    ) -> dict[str, Any]:
        """Compare the export's logits with the expected ones; return what differs.

        Raises:
            CorruptionError: They differ by more than the tolerance.
        """
        if logits.shape != expected.shape:
            raise self._failure(
                "the logits have other shapes", str(expected.shape), str(logits.shape)
            )
        compared = compare(logits, expected)
        if not compared["relative_difference"] <= tolerance:  # with `not`, so that NaN fails
            raise self._failure(
                f"the export does not compute what {by} does",
                f"logits within {tolerance:g} of the largest one",
                f"{compared['largest_difference']:g} beside {compared['largest_logit']:g}",
            )
        return {"tolerance": tolerance, **compared}

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
            next_step=_NEXT_STEP if self.reference is None else _NEXT_STEP_OF_MAPS,
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
