"""The log of a server or worker: every line has its time, level, logger, event, request and job.

As text for people or as JSON for machines; to standard error. Lines of the libraries go the same
way, and no line has a secret in it.
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

from cairn.service.observing.identity import operation_id, request_id
from cairn.service.observing.redaction import HIDDEN, names_a_secret, redact

LIBRARIES: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "dbos")
"""Those that may have set up a log of their own."""

_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; all else was given to it by `extra`."""

_PLAIN_VALUE: Final = re.compile(r'[^\s"=]+')

# What DBOS adds to every record of its own.
_LEFT_OUT: Final = frozenset(
    {"applicationID", "applicationVersion", "executorID", "operationUUID", "color_message"}
)


def start_logging(form: Literal["text", "json"], level: str) -> None:
    """Write the log of this process to standard error from now on.

    Args:
        form: How a line looks.
        level: From which one on lines of Cairn are written. Of libraries it is `warning` at least,
            unless this is `debug`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    ours = logging.getLevelNamesMapping()[level.upper()]
    others = logging.INFO if ours <= logging.DEBUG else max(ours, logging.WARNING)
    root.setLevel(others)
    logging.getLogger("cairn").setLevel(ours)
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        # Its own, and not the root's: a library that finds none would set up another.
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(others)
    logging.getLogger("sqlalchemy").setLevel(max(ours, logging.WARNING))  # else every statement
    logging.captureWarnings(True)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return json.dumps(_clean(fields_of(record)), ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """Time, level, logger, event, then key=value; below it the traceback, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record."""
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
    """What a line tells, with any secrets still in it."""
    fields: dict[str, Any] = {
        "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
        "request_id": request_id(),
    }
    # DBOS's own lines name the job that they are about by themselves.
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
    """The same without secrets, however deep they lie."""
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
    if isinstance(value, float) and math.isfinite(value):  # JSON has no other
        return value
    return redact(str(value))


def _one_line(text: str) -> str:
    """What a client has sent makes no line that looks like one of ours."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def _text(value: Any) -> str:
    """Text with blanks or quotes in it is quoted as in JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text, ensure_ascii=False)
