"""Policies of a root, in every kind of store."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from cairn import InvalidURIError, PreconditionFailedError, UnsupportedFormatError
from cairn.storage.runs.policies import Policies


def test_a_policy_is_created_changed_and_deleted_as_it_was_seen(root_uri):
    policies = Policies(root_uri)
    assert policies.judge() == ([], {})
    made = policies.put("gate", "checked", {"alias": "a"}, by="ana", expect=None)
    changed = policies.put("gate", "checked", {"alias": "b"}, by="ben", expect=1)
    assert (changed.sequence, changed.id) == (2, made.id)
    for expect in (None, 1, 3):
        with pytest.raises(PreconditionFailedError, match="sequence 2, set by ben at") as caught:
            policies.put("gate", "checked", {}, by="cy", expect=expect)
        assert caught.value.current == changed
    with pytest.raises(PreconditionFailedError, match="expected sequence 1"):
        policies.delete("gate", "checked", by="cy", expect=1)
    assert Policies(root_uri).judge() == ([changed], {})
    policies.delete("gate", "checked", by="cy", expect=2)
    assert Policies(root_uri).judge() == ([], {})
    with pytest.raises(PreconditionFailedError, match="none: deleted by cy"):
        policies.put("gate", "checked", {}, by="ana", expect=2)
    again = policies.put("gate", "checked", {}, by="ana", expect=None)
    assert (again.sequence, again.id == made.id) == (4, False)


def test_of_many_who_create_a_policy_exactly_one_wins(root_uri):
    def create(number):
        try:
            return Policies(root_uri).put("gate", "x", {"n": number}, by=str(number), expect=None)
        except PreconditionFailedError as exc:
            return exc.current

    with ThreadPoolExecutor(4) as pool:
        records = list(pool.map(create, range(4)))
    assert len({record.by for record in records}) == 1


def test_records_are_bounded_in_number_and_named(root_uri, monkeypatch):
    policies = Policies(root_uri)
    for name in "abc":
        policies.put("gate", name, {}, by="ana", expect=None)
    monkeypatch.setattr("cairn.storage.runs.policies.MAX_POLICIES", 2)
    with pytest.raises(UnsupportedFormatError, match="too many policies"):
        policies.put("gate", "d", {}, by="ana", expect=None)
    records, errors = policies.judge()
    assert [record.name for record in records] == ["a", "b"]
    assert "found 3, of which the first 2 by name are read" in str(errors[".cairn/policies/"])


@pytest.mark.parametrize(("kind", "name"), [("gate", "../x"), ("a.b", "x"), ("Gate", "x")])
def test_names_that_lead_elsewhere_are_refused(some_root_uri, kind, name):
    with pytest.raises(InvalidURIError, match="invalid policy"):
        Policies(some_root_uri).put(kind, name, {}, by="ana", expect=None)
