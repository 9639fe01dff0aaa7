import pytest

from tests.service.seams import event_stream


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_events_are_read_whatever_the_chunks_and_line_ends(size, newline):
    text = (
        "\ufeff: comment\nretry: 250\nid: 1\ndata: one\u2028line\ndata:two\n\n"
        "event: x\n\nid: 2\nid\ndata\nunknown: x\n\ndata: three\n\ndata: cut off"
    )
    body = text.replace("\n", newline).encode()
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    stream = event_stream.EventStream()
    events = [event for chunk in chunks for event in stream.read(chunk)]
    found = [(event.data, event.id, event.retry_seconds) for event in events]
    assert found == [("one\u2028line\ntwo", "1", 0.25), ("", "", 0.25), ("three", None, 0.25)]
