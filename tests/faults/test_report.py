"""What the long run keeps."""

import json

from tests.faults.report import keep


def row(fault, store, survived):
    return {"fault": fault, "store": store, "trials": 9, "survived": survived, "lost": 9 - survived}


def test_a_row_takes_the_place_of_the_one_of_the_same_fault_and_store(tmp_path):
    path = tmp_path / "new" / "faults.json"
    for one in (row("b", "gcs", 9), row("b", "file", 1), row("a", "gcs", 9), row("b", "file", 9)):
        keep(path, one)
    expected = [row("a", "gcs", 9), row("b", "file", 9), row("b", "gcs", 9)]
    assert json.loads(path.read_text()) == expected
