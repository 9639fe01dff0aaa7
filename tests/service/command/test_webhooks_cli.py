"""`cairn webhooks`, asked of a control plane in a process of its own."""

import json

import pytest

from tests.service.commands import ExitStatus, cairn_here
from tests.service.planes import running_plane
from tests.service.receivers import receiving
from tests.service.stores import make_run


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    folder = tmp_path_factory.mktemp("webhooks")
    make_run(folder / "store" / "run", [3])
    (folder / "data").mkdir()
    allowed = {"CAIRN_WEBHOOK_NETWORKS": "127.0.0.0/8"}
    with running_plane(folder / "store", folder / "data", allowed) as (url, _):

        def answer(*arguments, status=0):
            done = cairn_here(*map(str, arguments), "--url", url)
            assert done.returncode == status, done.stderr
            return done.stdout if status == 0 else done.stderr

        yield answer


def rows(text):
    titles, *lines = (line.split("\t") for line in text.splitlines())
    return [dict(zip(titles, line, strict=True)) for line in lines]


def test_webhook_is_made_tested_listed_and_deleted(ask):
    with receiving() as receiver:
        made = json.loads(ask("webhooks", "create", receiver.url, "--runs", "ru*", "--json"))
        webhook, secret = made["details"]["id"], made["secret"]
        (listed,) = rows(ask("webhooks", "list"))
        assert (listed["webhook"], listed["url"], listed["kinds"]) == (webhook, receiver.url, "all")
        assert (listed["runs"], listed["pending"], listed["dead"]) == ("ru*", "0", "0")
        ask("webhooks", "test", webhook)
        ask("promote", "run", 3, "production", "--create")
        receiver.wait(lambda: len(receiver.messages) >= 2)
        assert all(one.is_signed(secret) for one in receiver.messages)
        receiver.wait(lambda: '"pending"' not in ask("webhooks", "deliveries", webhook, "--json"))
        told = rows(ask("webhooks", "deliveries", webhook))
        assert [(one["event"], one["run"], one["state"]) for one in told] == [
            ("alias.moved", "default/run", "delivered"),
            ("webhook.test", "", "delivered"),
        ]
        assert {one["status"] for one in told} == {"200"}
        again = json.loads(ask("webhooks", "redeliver", webhook, told[0]["n"], "--json"))
        assert (again["state"], again["attempts"]) == ("pending", 0)
        receiver.wait(lambda: len(receiver.messages) == 3)
        assert receiver.messages[2].uid == again["event"]["uid"]
        assert ask("webhooks", "delete", webhook).strip() == f"webhook {webhook} deleted"
        assert rows(ask("webhooks", "list")) == []


def test_secret_is_printed_alone_or_written_and_what_is_said_of_it_apart(ask, tmp_path):
    file = tmp_path / "webhook.secret"
    create = ("webhooks", "create", "https://ci.example.com/cairn", "--kind", "alias.moved")
    made = json.loads(ask(*create, "--output", file, "--json"))
    assert (file.stat().st_mode & 0o777, file.read_text()[:6]) == (0o600, "whsec_")
    ask("webhooks", "delete", made["id"])
    secret = ask(*create)
    assert secret.startswith("whsec_")
    assert len(secret.splitlines()) == 1
    (listed,) = rows(ask("webhooks", "list"))
    assert listed["kinds"] == "alias.moved"
    assert json.loads(ask("webhooks", "delete", listed["webhook"], "--json")) == {"webhooks": []}


def test_address_that_may_not_be_sent_to_is_refused_and_says_why(ask):
    said = ask("webhooks", "create", "https://169.254.169.254/", status=ExitStatus.USAGE)
    assert "169.254.169.254 is no public address" in said
    said = ask("webhooks", "delete", "a" * 12, status=ExitStatus.NOT_FOUND)
    assert "`cairn webhooks list` lists them" in said
