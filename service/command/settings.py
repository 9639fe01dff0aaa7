"""`cairn settings`: the settings of the control plane, with their defaults and values."""

import os
from typing import Final

import typer

from cairn.service.command.options import console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.command.variables import PREFIX, default_text
from cairn.service.settings import Settings

app: Final = typer.Typer()

HIDDEN: Final = "(hidden)"


@app.command("settings")
def settings_command(json: JsonOption = False) -> None:
    """List the control plane's settings, defaults and values.

    Each is a variable of the environment. Values that may have a password are hidden. `cairn
    doctor` checks them.
    """
    environment = {name.upper(): value for name, value in os.environ.items()}
    settings = []
    for name, field in Settings.model_fields.items():
        variable = f"{PREFIX}{name.upper()}"
        value = environment.get(variable)
        settings.append(
            {
                "variable": variable,
                "value": HIDDEN if value and not field.repr else value,
                "default": default_text(field),
                "description": field.description,
            }
        )
    if json:
        print_document({"settings": settings})
        return
    titles = ("variable", "value", "default", "what")
    print_table(console, titles, [tuple(setting.values()) for setting in settings])
