"""Server-sent events, read from the bytes of a stream as they come."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamEvent:
    """Server-sent event, with its id if it has one."""

    data: str
    id: str | None
    retry_seconds: float | None = None


class EventStream:
    """Incremental parser of a `text/event-stream` body.

    Source: WHATWG HTML, section 9.2.6, "Interpreting an event stream".
    """

    def __init__(self) -> None:
        self._data: list[str] = []
        self._id: str | None = None
        self._retry_seconds: float | None = None
        self._rest = b""
        self._after_return = False
        self._at_start = True

    def read(self, chunk: bytes) -> list[StreamEvent]:
        """Return the events that the next bytes complete."""
        events = []
        for line in self._lines(chunk):
            if not line:  # the end of an event
                if self._data:
                    text = "\n".join(self._data)
                    events.append(StreamEvent(text, self._id, self._retry_seconds))
                self._data, self._id = [], None
                continue
            field, _, content = line.partition(":")
            content = content.removeprefix(" ")
            if field == "data":
                self._data.append(content)
            elif field == "id" and "\0" not in content:
                self._id = content
            elif field == "retry" and content.isascii() and content.isdigit():
                self._retry_seconds = int(content) / 1000
        return events

    def _lines(self, chunk: bytes) -> list[str]:
        r"""Split into lines at \r\n, \n or \r only; str.splitlines() would also split at U+2028."""
        if self._after_return and chunk:
            chunk = chunk.removeprefix(b"\n")  # the other half of \r\n
            self._after_return = False
        rest = self._rest + chunk
        if not rest:
            return []
        self._after_return = rest.endswith(b"\r")
        *complete, self._rest = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        lines = [line.decode("utf-8", "replace") for line in complete]
        if lines and self._at_start:
            lines[0] = lines[0].removeprefix("\ufeff")
            self._at_start = False
        return lines
