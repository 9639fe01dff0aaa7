"""Greedy generation with real weights, SmolLM2-135M, against transformers: every token equal."""

import numpy as np
import pytest
import torch

from cairn.state import DecoderForCausalLM
from examples.demo.weights import carried_tokenizer, smollm2_gguf

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):",
)
NEW = 64


@pytest.fixture
def one_thread():
    """Threads that wait for each other by spinning are very slow beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_64_greedy_tokens_of_unequal_prompts_equal_transformers():
    ours = DecoderForCausalLM.from_pretrained(smollm2_gguf(), auto_shard_model=False)
    tokenizer = carried_tokenizer(ours.config.tokenizer_files)
    given = tokenizer(list(PROMPTS), return_tensors="np", padding=True, padding_side="left")
    ids, mask = given["input_ids"], given["attention_mask"]
    lengths = mask.sum(axis=1)
    assert len(set(lengths.tolist())) == len(PROMPTS)
    assert not mask[:, 0].all()
    found = ours.generate(ids, mask, max_new_tokens=NEW, eos_token_id=())
    theirs = ours.to_pytorch().eval()
    del ours
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=tokenizer.pad_token_id,
        ).numpy()
    np.testing.assert_array_equal(found.sequences, expected)
    assert found.lengths.tolist() == [NEW] * len(PROMPTS)
    assert "Paris" in tokenizer.decode(expected[0])
