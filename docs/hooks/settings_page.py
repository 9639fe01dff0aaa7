"""The settings of the control plane as a page, from the class that reads them."""

from typing import Any

from cairn.service.command.variables import default_text

HEAD = """# Settings

What the control plane is told at its start. Each setting is an environment variable; `cairn serve`
has options for the usual ones, and they win. A value that cannot work ends the start with one line
that names every such variable.

| variable | default | what |
|---|---|---|
"""

TAIL = """
Without `CAIRN_DATA_DIR` the databases are in `$XDG_STATE_HOME/cairn`, else `~/.local/state/cairn`,
else `./.cairn`: the first that can be written. That folder is of the first store that is served
from there; each other one has its own below `stores/` in it, by its URI. Nothing is moved: whoever
moves a store, and wants its keys, audit trail and jobs to go on with it, says `CAIRN_DATA_DIR`.

The client and the commands that ask a server read `CAIRN_URL` (default `http://127.0.0.1:8321`),
and their key from `CAIRN_KEY` or the file that `CAIRN_KEY_FILE` names.
A training job where `CAIRN_URL` is set announces each step that it has saved, so that lists have it
at once, and waits for nothing: the server's root that the run lies in is named by
`CAIRN_ANNOUNCE_ROOT` (default `default`).

`cairn --env-file FILE` sets the variables of a file that are not set yet, before whatever command
follows; `CAIRN_ENV_FILE` names one for every command. Each line is `NAME=VALUE`, quoted as a shell
has it; `cairn init` writes such a file.
"""


def settings_page(settings: Any) -> str:
    """Returns the page of a pydantic settings class."""
    prefix = settings.model_config["env_prefix"]
    rows = []
    for name, field in settings.model_fields.items():
        rows.append(f"| `{prefix}{name.upper()}` | {_default(field)} | {field.description} |")
    return HEAD + "\n".join(rows) + "\n" + TAIL


def _default(field: Any) -> str:
    text = default_text(field)
    return text if " " in text or not text else f"`{text}`"
