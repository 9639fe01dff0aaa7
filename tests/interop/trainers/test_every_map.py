"""Mistakes in each map of another trainer's tree, one at a time; `make proofs` walks all."""

import pytest

from tests.interop.trainers.walk import TOLERANCE, KeptModel, mutants
from tests.trainers.kept import KEPT


@pytest.mark.parametrize("name", KEPT)
def test_no_mistake_in_an_operation_of_any_map_survives_the_trainers_logits(name):
    model = KeptModel(name)
    assert model.difference(model.map.rules) <= TOLERANCE
    survivors, by_shapes, tried = [], 0, 0
    for mistake, rules in mutants(model.map.rules):
        tried += 1
        if not model.fits(rules):
            by_shapes += 1
        elif model.difference(rules) <= 10 * TOLERANCE:
            survivors.append(mistake)
    print(f"{name}: {tried} mistakes, {by_shapes} found by shapes")
    assert not survivors
