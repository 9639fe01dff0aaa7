"""Path convertors: names end before a verb's colon, paths of leaves and files where the URL ends.

So `GET …/7:promote` is not read as a step named `7:promote`; the verb has no such method (405).
Starlette's own `path` ends before a newline: of two leaves of which one has a newline at the end of
its name, it would read the other.
"""

from starlette.convertors import Convertor, register_url_convertor


class NameConvertor(Convertor[str]):
    """Convertor of one path segment without a colon."""

    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        """Return the text unchanged."""
        return value

    def to_string(self, value: str) -> str:
        """Return the text unchanged."""
        return value


class RestConvertor(Convertor[str]):
    """All that follows, newlines too."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        """As it is."""
        return value

    def to_string(self, value: str) -> str:
        """As it is."""
        return value


register_url_convertor("name", NameConvertor())
register_url_convertor("rest", RestConvertor())


def named(parameter: str) -> str:
    """Return the placeholder of a parameter for a route's path."""
    return f"{{{parameter}:name}}"
