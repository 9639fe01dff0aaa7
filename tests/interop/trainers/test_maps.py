"""Maps of other trainers' trees: what their own models compute, and mistakes that are found."""

from tests.interop.trainers.walk import TOLERANCE, KeptModel, walk

IN_SHORT = "maxtext-llama3.1-scanned"


def test_no_mistake_in_an_operation_of_a_map_survives_the_trainers_logits():
    model = KeptModel(IN_SHORT)
    assert model.difference(model.map.rules) <= TOLERANCE
    tried, by_shapes, survivors = walk(model)
    assert tried > 20
    assert by_shapes < tried, "else no logits were needed"
    assert not survivors
