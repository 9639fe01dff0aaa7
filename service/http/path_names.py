"""Path convertors: names end before a verb's colon; paths of leaves and files end with the URL.

So `GET …/7:promote` is not read as a step named `7:promote`, but refused, since the verb has no GET
(405). Starlette's own `path` stops at a newline at the end: for a leaf whose name ends with one, it
would return the leaf of that name without it.
"""

from starlette.convertors import PathConvertor, register_url_convertor


class NameConvertor(PathConvertor):
    """Convertor of one path segment without a colon."""

    regex = "[^/:]+"


class RestConvertor(PathConvertor):
    """Convertor of the rest of a path, newlines included."""

    regex = "(?s:.*)"


register_url_convertor("name", NameConvertor())
register_url_convertor("rest", RestConvertor())


def named(parameter: str) -> str:
    """Return the placeholder that stands for a parameter in a route's path."""
    return f"{{{parameter}:name}}"
