"""Parser of the columns of a list: `best.loss, config.hidden_size, labels.owner`."""

from collections.abc import Mapping
from typing import Final

from cairn.service.filters.expressions import Path
from cairn.service.filters.fields import Field
from cairn.service.filters.text_reader import TextReader

LONGEST_COLUMNS: Final = 2000
MAX_COLUMNS: Final = 20


def parse_columns(text: str, fields: Mapping[str, Field]) -> tuple[Path, ...]:
    """Parse a `columns` parameter: members of keyed fields, with commas between them.

    Args:
        text: Text from the client; it may be empty.
        fields: Fields of the list's entries.

    Raises:
        InvalidRequestError: The text is invalid; the error has the position, and what was expected
            there.
    """
    keyed = {name: field for name, field in fields.items() if field.keyed}
    reader = TextReader(text, "columns", kept=keyed)
    if len(text) > LONGEST_COLUMNS:
        reader.refuse_all(f"expected {LONGEST_COLUMNS} characters at most, found {len(text)}")
    paths: dict[Path, None] = {}
    while not reader.at_end():
        at = reader.place()
        if len(paths) == MAX_COLUMNS:
            reader.refuse(f"at most {MAX_COLUMNS} columns", at=at)
        path, _ = reader.path()
        if path.key is None:
            reader.refuse(f"the name of one of them: {path.field}.NAME")
        paths[path] = None
        if not reader.at_end() and not reader.take(","):
            reader.refuse("a comma or the end")
    return tuple(paths)
