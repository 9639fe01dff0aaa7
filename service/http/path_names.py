"""Names in a path end where a verb begins, and paths of leaves and files where the URL does.

So `GET …/7:promote` is no look at a step of that odd name: the verb does not have that method. What
the framework calls a path ends before a newline: of two leaves of which one has a newline at the
end of its name it would read the other.
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
    """The parameter as a part of a route's path."""
    return f"{{{parameter}:name}}"
