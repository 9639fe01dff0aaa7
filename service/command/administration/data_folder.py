"""Whose databases a command administers that asks no server."""

from pathlib import Path
from typing import TYPE_CHECKING

from cairn.service.command.options import errors

if TYPE_CHECKING:
    from cairn.service.settings import Settings  # takes a while


def administered(data_dir: Path | None) -> "Settings":
    """The settings of the server that is meant; says of which store, if nobody has.

    Raises:
        SettingsError: A setting cannot work, or several servers may be meant.
    """
    from cairn.service.settings import load_administered

    settings, owner = load_administered(data_dir)
    if owner is not None:
        errors.print(f"Of the store {owner}, in {settings.data_dir}", soft_wrap=True, markup=False)
    return settings
