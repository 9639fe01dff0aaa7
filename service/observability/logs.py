"""Log of a server or worker: each line has time, level, logger, event, request and job.

Lines go to standard error, as text for people or as JSON for machines. The same handler writes the
lines of libraries, and removes secrets from all lines.
"""

import json
import logging
import math
import re
import sys
import textwrap
import traceback
from datetime import UTC, datetime
from typing import Any, Final, Literal

from cairn.service.observability.ids import operation_id, request_id
from cairn.service.observability.redaction import HIDDEN, names_a_secret, redact

LIBRARIES: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "dbos")
"""Loggers of libraries that may have handlers of their own."""

_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes that every record has; all other attributes come from `extra`."""

_PLAIN_VALUE: Final = re.compile(r'[^\s"=]+')

# Attributes that DBOS adds to each of its records.
_LEFT_OUT: Final = frozenset(
    {"applicationID", "applicationVersion", "executorID", "operationUUID", "color_message"}
)


def start_logging(form: Literal["text", "json"], level: str) -> None:
    """Write the log of this process to standard error from now on.

    Args:
        form: Form of a line.
        level: Lowest level of Cairn's lines. For libraries it is `warning` at least, unless `level`
            is `debug`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    own_level = logging.getLevelNamesMapping()[level.upper()]
    others = logging.INFO if own_level <= logging.DEBUG else max(own_level, logging.WARNING)
    root.setLevel(others)
    logging.getLogger("cairn").setLevel(own_level)
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        # With a handler on its logger, a library does not add one of its own.
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(others)
    # SQLAlchemy logs every statement at info.
    logging.getLogger("sqlalchemy").setLevel(max(own_level, logging.WARNING))
    logging.captureWarnings(True)


class JsonLines(logging.Formatter):
    """Formatter that writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return json.dumps(_clean(fields_of(record)), ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """Formatter that writes time, level, logger, event, then key=value; a traceback comes below."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        fields = _clean(fields_of(record))
        exception = fields.pop("exception", None)
        head = [
            _one_line(str(fields.pop(name))) for name in ("timestamp", "level", "logger", "event")
        ]
        head[1] = f"{head[1]:<8}"
        pairs = [f"{name}={_text(value)}" for name, value in fields.items() if value is not None]
        lines = [" ".join(head + pairs)]
        if exception is not None:
            lines.append(textwrap.indent(str(exception["stack"]).rstrip(), "  "))
        return "\n".join(lines)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a record; they may still have secrets."""
    fields: dict[str, Any] = {
        "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
        "request_id": request_id(),
    }
    # DBOS's own lines have the id of their job.
    operation = operation_id() or getattr(record, "operationUUID", None)
    if operation is not None:
        fields["operation_id"] = operation
    fields |= {
        name: value
        for name, value in vars(record).items()
        if name not in _PLAIN and name not in _LEFT_OUT
    }
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        fields["exception"] = {
            "type": f"{type(error).__module__}.{type(error).__qualname__}",
            "message": str(error),
            "stack": "".join(traceback.format_exception(error)),
        }
    return fields


def _clean(value: Any) -> Any:
    """Return the value without secrets, however deeply nested."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {
            str(key): HIDDEN if names_a_secret(str(key)) else _clean(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):  # JSON has only finite numbers
        return value
    return redact(str(value))


def _one_line(text: str) -> str:
    """Escape unprintable characters, so that a client's text cannot forge a line of the log."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def _text(value: Any) -> str:
    """Return the value as text, quoted as in JSON if it has blanks or quotes."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text, ensure_ascii=False)
