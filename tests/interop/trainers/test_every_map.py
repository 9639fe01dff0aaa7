"""Mistakes in each map of another trainer's tree, one at a time; `make proofs` walks all."""

import pytest

from tests.interop.trainers.walk import TOLERANCE, KeptModel, walk
from tests.trainers.kept import KEPT


@pytest.mark.parametrize("name", KEPT)
def test_no_mistake_in_an_operation_of_any_map_survives_the_trainers_logits(name):
    model = KeptModel(name)
    assert model.difference(model.map.rules) <= TOLERANCE
    assert not walk(model).survivors
