"""Settings of commands that work on a server's databases, without asking the server."""

from pathlib import Path
from typing import TYPE_CHECKING

from cairn.service.command.options import errors

if TYPE_CHECKING:
    from cairn.service.settings import Settings  # imported late: it takes a while


def administered(data_dir: Path | None) -> "Settings":
    """Load the settings of the server to administer; print its store if the caller named none.

    Raises:
        SettingsError: A setting cannot work, or there are several servers to choose from.
    """
    from cairn.service.settings import load_administered

    settings, owner = load_administered(data_dir)
    if owner is not None:
        errors.print(f"Of the store {owner}, in {settings.data_dir}", soft_wrap=True, markup=False)
    return settings
