"""Keys as they are made, kept, told apart and revoked."""

import re
import threading
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from cairn.service.access.callers import Scope
from cairn.service.access.keys import (
    Credential,
    caller_of,
    counts,
    find_key,
    list_keys,
    make_key,
    revoke_key,
)
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import KeyRow
from cairn.service.errors import KeyNameTakenError, UnauthenticatedError, UnknownKeyError

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def catalog(database_url):
    catalog = Catalog.open(database_url)
    yield catalog
    catalog.close()


def make(catalog, name="ci", **changed):
    given = {"scope": Scope.READ, "roots": None, "expires": None, "by": "test", "now": NOW}
    return make_key(catalog, name=name, **(given | changed))


def test_of_a_key_the_database_has_no_more_than_its_digest(catalog):
    row, key = make(catalog)
    assert re.fullmatch(r"ck_[a-z2-7]{12}_[A-Za-z0-9_-]{43}", key)
    secret = key.split("_", 2)[2]
    with catalog.read() as session:
        kept = session.execute(select(KeyRow.__table__)).one()
    assert secret not in str(tuple(kept))
    assert secret not in repr(row)
    assert key.split("_")[1] == row.id


def test_key_is_its_callers_until_it_is_revoked(catalog):
    row, key = make(catalog, scope=Scope.OPERATE, roots=["b", "a", "b"])
    credential = Credential.parse(key)
    caller = caller_of(find_key(catalog, row.id), credential, NOW)
    assert (caller.name, caller.scope, caller.roots) == ("ci", Scope.OPERATE, {"a", "b"})
    revoke_key(catalog, row.id, now=NOW)
    with pytest.raises(UnauthenticatedError, match=f"key {row.id} of 'ci': .* was revoked at 2026"):
        caller_of(find_key(catalog, row.id), credential, NOW)


def test_key_counts_until_the_moment_that_it_expires(catalog):
    end = NOW + timedelta(days=90)
    row, key = make(catalog, expires=end)
    credential = Credential.parse(key)
    found = find_key(catalog, row.id)
    assert caller_of(found, credential, end - timedelta(microseconds=1)).name == "ci"
    with pytest.raises(UnauthenticatedError, match="expired at 2026"):
        caller_of(found, credential, end)


def test_another_secret_under_a_known_id_is_refused_and_says_nothing_of_the_key(catalog):
    row, key = make(catalog)
    revoke_key(catalog, row.id, now=NOW)
    other = Credential.parse(key[:-1] + ("A" if key[-1] != "A" else "B"))
    for found in (find_key(catalog, row.id), None):
        with pytest.raises(UnauthenticatedError) as raised:
            caller_of(found, other, NOW)
        assert "expected a key that this server knows, found another" in str(raised.value)
        assert "ci" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ck_",
        "ck_abc_def",
        "CK_abcdefghijkl_" + "a" * 43,
        "ck_abcdefghijkl_" + "a" * 42,
        "ck_abcdefghijkl_" + "a" * 44,
        "ck_abcdefghijkl_" + "a" * 43 + "\n",
        "ck_abcdefghijk1_" + "a" * 43,
        "ck_abcdefghijkl_" + "é" * 43,
    ],
)
def test_text_of_another_form_is_no_key(text):
    assert Credential.parse(text) is None


def test_one_key_that_counts_has_a_name(catalog):
    first, _ = make(catalog)
    with pytest.raises(KeyNameTakenError, match=f"found key {first.id}"):
        make(catalog)
    revoke_key(catalog, first.id, now=NOW)
    second, _ = make(catalog, expires=NOW + timedelta(seconds=1))
    third, _ = make(catalog, now=NOW + timedelta(seconds=1))
    assert {row.id for row in list_keys(catalog)} == {first.id, second.id, third.id}


def test_of_keys_made_at_once_under_one_name_one_is_made(catalog):
    made, refused = [], []

    def one():
        try:
            made.append(make(catalog))
        except KeyNameTakenError:
            refused.append(1)

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(made), len(refused)) == (1, 5)


def test_revoking_is_for_good_and_keeps_its_first_moment(catalog):
    row, _ = make(catalog)
    revoke_key(catalog, row.id, now=NOW)
    again = revoke_key(catalog, row.id, now=NOW + timedelta(days=1))
    assert again.revoked == NOW
    assert not counts(again, NOW)
    with pytest.raises(UnknownKeyError, match="expected the id of one"):
        revoke_key(catalog, "a" * 12, now=NOW)
