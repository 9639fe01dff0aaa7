"""Names in a path end where a verb begins.

So `GET …/7:promote` is no look at a step of that odd name: the verb does not have that method.
"""

from starlette.convertors import Convertor, register_url_convertor


class NameConvertor(Convertor[str]):
    """One part of a path, without a colon."""

    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        """As it is."""
        return value

    def to_string(self, value: str) -> str:
        """As it is."""
        return value


register_url_convertor("name", NameConvertor())


def named(parameter: str) -> str:
    """The parameter as a part of a route's path."""
    return f"{{{parameter}:name}}"
