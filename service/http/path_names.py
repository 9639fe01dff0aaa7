"""Path convertor for names that end before a verb's colon.

So `GET …/7:promote` is not read as a step named `7:promote`; the verb has no such method (405).
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


register_url_convertor("name", NameConvertor())


def named(parameter: str) -> str:
    """Return the placeholder of a parameter for a route's path."""
    return f"{{{parameter}:name}}"
