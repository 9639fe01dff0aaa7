"""Maps of other trainers' trees: what their own models compute, and mistakes that are found."""

from tests.interop.trainers.walk import TOLERANCE, KeptModel, mutants

IN_SHORT = "maxtext-llama3.1-scanned"


def test_no_mistake_in_an_operation_of_a_map_survives_the_trainers_logits():
    model = KeptModel(IN_SHORT)
    assert model.difference(model.map.rules) <= TOLERANCE
    survivors, by_shapes, tried = [], 0, 0
    for name, rules in mutants(model.map.rules):
        tried += 1
        if not model.fits(rules):
            by_shapes += 1
        elif model.difference(rules) <= 10 * TOLERANCE:
            survivors.append(name)
    print(f"{tried} mistakes, {by_shapes} found by shapes")
    assert tried > 20
    assert by_shapes < tried, "else no logits were needed"
    assert not survivors
