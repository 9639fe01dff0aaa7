"""Greedy generation with real weights, SmolLM2-135M, against transformers: every token equal.

`make proofs` does it; `make test` has tiny models generate as transformers does, by every rule
(`test_generation.py`, `test_generation_settings.py`).
"""

import numpy as np
import torch

from cairn import DecoderForCausalLM
from examples.demo.weights import carried_tokenizer, smollm2_gguf

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):",
)
NEW = 16
RULED = 12


def test_greedy_tokens_of_the_whole_model_equal_transformers_and_it_knows_the_capital_of_france():
    assert "Paris" in check_tokens(smollm2_gguf())


def check_tokens(file):
    """Of the model in a GGUF file; what it says after the first prompt."""
    ours = DecoderForCausalLM.from_pretrained(file, auto_shard_model=False)
    tokenizer = carried_tokenizer(ours.config.tokenizer_files)
    given = tokenizer(list(PROMPTS), return_tensors="np", padding=True, padding_side="left")
    ids, mask = given["input_ids"], given["attention_mask"]
    lengths = mask.sum(axis=1)
    assert len(set(lengths.tolist())) == len(PROMPTS)
    assert not mask[:, 0].all()
    found = ours.generate(ids, mask, max_new_tokens=NEW, eos_token_id=())
    ends = [int(found.sequences[row, -9]) for row in range(len(PROMPTS))]  # of the 8th token
    ruled = [
        {"eos_token_id": [], "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"eos_token_id": ends, "min_new_tokens": 10},
    ]
    pad = tokenizer.pad_token_id
    found_ruled = [
        ours.generate(ids, mask, max_new_tokens=RULED, pad_token_id=pad, **settings)
        for settings in ruled
    ]
    theirs = ours.to_pytorch().eval()
    del ours

    def expected(**settings):
        with torch.no_grad():
            made = theirs.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                pad_token_id=pad,
                **settings,
            )
        return made.numpy()

    plain = expected(max_new_tokens=NEW, eos_token_id=[])
    np.testing.assert_array_equal(found.sequences, plain)
    assert found.lengths.tolist() == [NEW] * len(PROMPTS)
    for settings, made in zip(ruled, found_ruled, strict=True):
        np.testing.assert_array_equal(
            made.sequences, expected(max_new_tokens=RULED, **settings), err_msg=str(settings)
        )
        assert not np.array_equal(np.asarray(made.sequences), plain[:, : ids.shape[1] + RULED])
    assert min(found_ruled[1].lengths.tolist()) >= 10
    return tokenizer.decode(plain[0])
