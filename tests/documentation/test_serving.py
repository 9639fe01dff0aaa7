"""docs/howto/serve.md as it is written: a promotion reaches an endpoint of `transformers serve`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.service import jobs
from tests.service.commands import environment
from tests.service.planes import running_plane

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "serve.md"
END = 127
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def blocks():
    """The blocks of the page that are typed in, in their order."""
    return re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def tokenizer_files(folder):
    words = {f"w{number}": number for number in range(END + 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{END}", unk_token="w0")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def answer_of(folder):
    """What the files of a folder answer, computed without a server."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == END
    ids = torch.tensor([tokenizer("w1 w2")["input_ids"]])
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_promoted_step_answers_at_the_endpoint(tmp_path):
    script, first, second, served, question = blocks()
    config = replace(jobs.CONFIG, hf_extra={"eos_token_id": END})
    assets = tokenizer_files(tmp_path / "tokenizer")
    with patch.dict(jobs.ASSETS, assets, clear=True):
        jobs.save_llama(tmp_path / "store" / "my-run", (1, 2), config=config)
    (tmp_path / "data").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (tmp_path / "bin").mkdir()
    cairn = tmp_path / "bin" / "cairn"
    cairn.write_text(f'#!/bin/sh\nexec {sys.executable} -m cairn "$@"\n')
    cairn.chmod(0o755)
    path = f"{cairn.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        variables = environment(url, PATH=path, PYTHONPATH=os.pathsep.join(sys.path))

        def shell(block):
            text = block.replace("8000", port)
            done = subprocess.run(
                ["bash", "-ec", text], cwd=tmp_path, env=variables, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        answers = []
        try:
            shell(script)
            for step, block in enumerate((first, second), start=1):
                shell(block)
                current = tmp_path / "models" / "my-run" / "current"
                assert current.resolve().name.startswith(f"{step:012d}-")
                assert json.loads(shell(served))["step"] == step
                answer = json.loads(shell(question))
                answers.append(answer["choices"][0]["message"]["content"].strip())
                assert answers[-1] == answer_of(current).strip()
        finally:
            pid = tmp_path / "server.pid"
            if pid.exists():
                os.kill(int(pid.read_text()), signal.SIGTERM)
    assert answers[0] != answers[1]
