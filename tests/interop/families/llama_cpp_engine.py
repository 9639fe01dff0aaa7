"""llama.cpp itself: its converter, and the logits that its library computes of a file.

Both come from one source, the sdist of `llama-cpp-python`; `make proofs` builds it. The library has
a process of its own for each file, since it ends the process where a file is wrong enough; the
converter has one for all, which takes seconds to start.

    python -m tests.interop.families.llama_cpp_engine logits FILE TOKENS.npy OUT.npy
    python -m tests.interop.families.llama_cpp_engine tokens FILE TEXTS.json OUT.json
    python -m tests.interop.families.llama_cpp_engine convert SOURCE < PAIRS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / ".llama.cpp" / "source" / "vendor" / "llama.cpp"


class EngineError(Exception):
    """What llama.cpp said before it gave up."""


def logits_of_file(path: Path, ids: np.ndarray) -> np.ndarray:
    """Of each position of one text.

    Args:
        path: a GGUF file.
        ids: [length], of tokens.

    Returns:
        [length, vocabulary], float32.
    """
    tokens, out = path.with_suffix(".ids.npy"), path.with_suffix(".logits.npy")
    np.save(tokens, ids)
    _run("logits", path, tokens, out)
    return np.load(out)


def tokens_of_file(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """What the library makes of texts by the file's tokenizer; special tokens are looked for."""
    asked, out = path.with_suffix(".texts.json"), path.with_suffix(".tokens.json")
    asked.write_text(json.dumps(list(texts)))
    _run("tokens", path, asked, out)
    return json.loads(out.read_text())


class Converter:
    """llama.cpp's converter, in a process that lasts until this is closed."""

    def __init__(self) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            _command("convert", SOURCE),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def convert(self, folder: Path, path: Path) -> Path:
        """A folder's model in float32, without a tokenizer.

        Raises:
            EngineError: it writes none of this folder.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), str(path)]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"llama.cpp's converter ended; its source: {SOURCE}")
        problem = json.loads(answer)
        if problem is not None:
            raise EngineError(problem)
        return path

    def close(self) -> None:
        """End it."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", __name__, *map(str, arguments)]


def _run(*arguments: object) -> None:
    command = _command(*arguments)
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    if done.returncode:
        raise EngineError("\n".join(done.stderr.splitlines()[-12:]))


def _logits(path: str, tokens: str, out: str) -> None:
    """One batch, one sequence; keys and values in float32, no flash attention."""
    import ctypes

    import llama_cpp

    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise SystemExit("llama.cpp does not load the file")
    ids = np.load(tokens)
    asked = llama_cpp.llama_context_default_params()
    asked.n_ctx = asked.n_batch = asked.n_ubatch = len(ids)
    asked.n_threads = asked.n_threads_batch = 1
    asked.flash_attn_type = 0
    asked.type_k = asked.type_v = 0  # GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, asked)
    if not context:
        raise SystemExit("llama.cpp makes no context")
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for position, token in enumerate(ids):
        batch.token[position] = int(token)
        batch.pos[position] = position
        batch.n_seq_id[position] = 1
        batch.seq_id[position][0] = 0
        batch.logits[position] = 1
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit("llama.cpp does not decode")
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = []
    for position in range(len(ids)):
        row = llama_cpp.llama_get_logits_ith(context, position)
        numbers = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
        rows.append(np.ctypeslib.as_array(numbers, (size,)).copy())
    np.save(out, np.stack(rows))


def _tokens(path: str, texts: str, out: str) -> None:
    import ctypes

    import llama_cpp

    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise SystemExit("llama.cpp does not load the vocabulary")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    made = []
    for text in json.loads(Path(texts).read_text()):
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), ids, len(ids), True, True)
        made.append(list(ids[:count]))
    Path(out).write_text(json.dumps(made))


def _convert(source: str) -> None:
    """Answer each line, of a folder and a path, with null or the problem."""
    sys.path[:0] = [source, f"{source}/gguf-py"]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    def no_vocabulary(model):  # tiny models have no tokenizer
        model.gguf_writer.add_tokenizer_model("none")
        model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])
        gguf.SpecialVocab(model.dir_model).add_to_gguf(model.gguf_writer)

    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        folder, path = map(Path, json.loads(line))
        problem = None
        try:
            # It asks transformers, which forgets keys that the converter wants.
            said = json.loads((folder / "config.json").read_text())
            said |= ModelBase.load_hparams(folder, False)
            kind = get_model_class(get_model_architecture(said, ModelType.TEXT))
            kind.set_vocab = no_vocabulary
            with torch.inference_mode():
                kind(folder, gguf.LlamaFileType.ALL_F32, path, hparams=said).write()
        except (Exception, SystemExit) as exc:
            problem = f"{type(exc).__name__}: {exc}"
        print(json.dumps(problem), file=answers, flush=True)


if __name__ == "__main__":
    {"logits": _logits, "tokens": _tokens, "convert": _convert}[sys.argv[1]](*sys.argv[2:])
