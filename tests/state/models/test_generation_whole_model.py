"""Greedy generation with all layers of SmolLM2: `make proofs`; `make test` does with a few."""

from examples.demo.weights import smollm2_gguf
from tests.state.models.test_generation_real_weights import check_tokens


def test_greedy_tokens_of_the_whole_model_equal_transformers_and_it_knows_the_capital_of_france():
    assert "Paris" in check_tokens(smollm2_gguf())
