"""Fields that a form of a page sends."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import parse_qs

from fastapi import Depends, Request, Response
from pydantic import BaseModel, ValidationError

from cairn.service.errors import InvalidRequestError
from cairn.service.http.field_errors import field_detail

MAX_FIELDS = 100

Body = TypeVar("Body", bound=BaseModel)


class Form:
    """Form fields by name."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        """Return a field, stripped of whitespace. A missing field is empty text."""
        return self._fields.get(name, [""])[0].strip()

    def texts(self, name: str) -> list[str]:
        """Return every non-empty value of a field that may be repeated."""
        return [text.strip() for text in self._fields.get(name, []) if text.strip()]

    def number(self, name: str) -> int | None:
        """Parse a field as a whole number; None if it is empty.

        Raises:
            InvalidRequestError: The field is not a whole number.
        """
        text = self.text(name)
        if not text:
            return None
        # 18 digits always fit the 64-bit integers of the databases.
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise invalid(name, f"{text[:40]!r} is not a whole number")
        return int(text)

    def decimal(self, name: str) -> float | None:
        """Parse a field as a float; None if it is empty.

        Raises:
            InvalidRequestError: The field is not a number.
        """
        text = self.text(name)
        if not text:
            return None
        try:
            return float(text)
        except ValueError as exc:
            raise invalid(name, f"{text[:40]!r} is not a number") from exc

    def checked(self, name: str) -> bool:
        """Return True if a checkbox is ticked."""
        return bool(self.text(name))


def body_of(kind: type[Body], **values: object) -> Body:
    """Build a request body of the API from the values of a form.

    Raises:
        InvalidRequestError: Values are invalid; the error names all of them.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as exc:
        errors = [
            {
                "field": ".".join(map(str, error["loc"])) or "form",
                "detail": field_detail(cast(Mapping[str, Any], error), is_value_shown=False),
            }
            for error in exc.errors()
        ]
        detail = "; ".join(f"{error['field']}: {error['detail']}" for error in errors)
        raise InvalidRequestError(detail, errors=errors) from exc


async def read_form(request: Request) -> Form:
    """Read the form in a request's body.

    Raises:
        InvalidRequestError: The body is not a form, or has more than `MAX_FIELDS` fields.
    """
    body = (await request.body()).decode("utf-8", "replace")
    try:
        return Form(parse_qs(body, keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError as exc:
        raise InvalidRequestError(f"The form has more than {MAX_FIELDS} fields.") from exc


FormDependency = Annotated[Form, Depends(read_form)]


def invalid(name: str, detail: str) -> InvalidRequestError:
    """Create the error for an invalid field."""
    return InvalidRequestError(f"{name}: {detail}", errors=[{"field": name, "detail": detail}])


def redirect(path: str) -> Response:
    """Return the answer that makes htmx open another page."""
    return Response(status_code=HTTPStatus.OK, headers={"HX-Redirect": path})
