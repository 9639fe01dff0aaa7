"""Path convertors: names end before a verb's colon, paths of leaves and files where the URL ends.

So `GET …/7:promote` is not read as a step named `7:promote`; the verb has no such method (405).
Starlette's own `path` ends before a newline: of two leaves of which one has a newline at the end of
its name, it would read the other.
"""

from starlette.convertors import PathConvertor, register_url_convertor


class NameConvertor(PathConvertor):
    """Convertor of one path segment without a colon."""

    regex = "[^/:]+"


class RestConvertor(PathConvertor):
    """Convertor of all that follows, newlines included."""

    regex = "(?s:.*)"


register_url_convertor("name", NameConvertor())
register_url_convertor("rest", RestConvertor())


def named(parameter: str) -> str:
    """Return the placeholder of a parameter for a route's path."""
    return f"{{{parameter}:name}}"
