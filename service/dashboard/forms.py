"""What a form of a page sends."""

from typing import Annotated, TypeVar
from urllib.parse import parse_qs

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from cairn.service.errors import InvalidRequestError

MOST_FIELDS = 100

Body = TypeVar("Body", bound=BaseModel)


class Form:
    """Fields of a form, by name."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        """A field without the space around it; empty if it was left empty, or there is none."""
        return self._fields.get(name, [""])[0].strip()

    def texts(self, name: str) -> list[str]:
        """Every value of a field that may be there more than once."""
        return [one.strip() for one in self._fields.get(name, []) if one.strip()]

    def number(self, name: str) -> int | None:
        """A whole number; None if it was left empty.

        Raises:
            InvalidRequestError: It is another text.
        """
        text = self.text(name)
        if not text:
            return None
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise invalid(name, f"expected a whole number, found {text[:40]!r}")
        return int(text)

    def decimal(self, name: str) -> float | None:
        """A number; None if it was left empty.

        Raises:
            InvalidRequestError: It is another text.
        """
        text = self.text(name)
        if not text:
            return None
        try:
            return float(text)
        except ValueError as exc:
            raise invalid(name, f"expected a number, found {text[:40]!r}") from exc

    def checked(self, name: str) -> bool:
        """Whether a box is ticked."""
        return bool(self.text(name))


def body_of(kind: type[Body], **values: object) -> Body:
    """A request as the API takes it, made of what a form has.

    Raises:
        InvalidRequestError: A value can't be; all that can't are told.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as exc:
        errors = [
            {"field": ".".join(map(str, one["loc"])) or "form", "detail": str(one["msg"])}
            for one in exc.errors()
        ]
        detail = "; ".join(f"{one['field']}: {one['detail']}" for one in errors)
        raise InvalidRequestError(detail, errors=errors) from exc


async def read_form(request: Request) -> Form:
    """The form that a request sends.

    Raises:
        InvalidRequestError: It is none.
    """
    body = (await request.body()).decode("utf-8", "replace")
    try:
        return Form(parse_qs(body, keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError as exc:
        raise InvalidRequestError(f"expected a form of at most {MOST_FIELDS} fields") from exc


FormDependency = Annotated[Form, Depends(read_form)]


def invalid(name: str, detail: str) -> InvalidRequestError:
    """The error for a field that can't be."""
    return InvalidRequestError(f"{name}: {detail}", errors=[{"field": name, "detail": detail}])
