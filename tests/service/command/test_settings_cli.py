"""`cairn settings`: what can be set, and what is."""

import json

from cairn.service.settings import Settings
from tests.service.commands import cairn_here


def test_settings_are_listed_with_defaults_and_values_without_passwords():
    variables = {"CAIRN_PORT": "99", "CAIRN_DATABASE_URL": "postgresql://cairn:word@host/db"}
    done = cairn_here("settings", "--json", **variables)
    assert done.returncode == 0
    listed = {entry["variable"]: entry for entry in json.loads(done.stdout)["settings"]}
    assert listed.keys() == {f"CAIRN_{name.upper()}" for name in Settings.model_fields}
    assert (listed["CAIRN_PORT"]["value"], listed["CAIRN_PORT"]["default"]) == ("99", "8321")
    assert listed["CAIRN_DATABASE_URL"]["value"] == "(hidden)"
    assert listed["CAIRN_HOST"]["value"] in (None, "127.0.0.1")
    table = cairn_here("settings", **variables)
    assert "CAIRN_PORT\t99\t8321\t" in table.stdout
    assert "word" not in done.stdout + table.stdout
