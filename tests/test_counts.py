"""Nouns with their numbers, as sentences have them."""

import pytest

from cairn.counts import count_text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, "step"), "0 steps"),
        ((1, "step"), "1 step"),
        ((2000, "step"), "2,000 steps"),
        ((1, "leaf"), "1 leaf"),
        ((3, "leaf"), "3 leaves"),
        ((1, "tensor doesn't", "tensors don't"), "1 tensor doesn't"),
        ((2, "tensor doesn't", "tensors don't"), "2 tensors don't"),
    ],
)
def test_a_noun_agrees_with_its_number(arguments, text):
    assert count_text(*arguments) == text
