"""No steps are saved to S3: the refusal, and the two facts that it rests on."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tensorstore as ts
from orbax.checkpoint._src.serialization import tensorstore_utils

from cairn import Checkpointer, InvalidURIError


def test_run_in_s3_is_refused_by_name_before_anything_is_asked():
    with pytest.raises(InvalidURIError) as caught:
        Checkpointer("s3://bucket/run")
    assert str(caught.value) == (
        "no arrays can be stored here: s3://bucket/run: "
        "expected a file:// or gs:// URI, found s3://. "
        "Save to a local disk or to Google Cloud Storage."
    )


def test_plain_orbax_can_not_read_arrays_in_s3():
    with pytest.raises(ValueError, match="Checkpoint path should be absolute"):
        tensorstore_utils.build_kvstore_tspec("s3://bucket/run/attempts/1/1/model", name="w")


class _OneObject(BaseHTTPRequestHandler):
    """As much of S3 as a conditional write or delete of one object takes."""

    protocol_version = "HTTP/1.1"
    etag = '"etag"'

    def _answer(self, status: int = 200) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.headers.get("If-Match")))
        self.send_response(status)
        self.send_header("ETag", self.etag)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET = do_PUT = _answer

    def do_DELETE(self) -> None:
        self._answer(204)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test looks at what was asked."""


@pytest.fixture
def s3(monkeypatch):
    """A store in a stand-in for S3, and the list of what it was asked: (method, If-Match)."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with ThreadingHTTPServer(("127.0.0.1", 0), _OneObject) as server:
        server.seen = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        spec = {"driver": "s3", "bucket": "bucket", "path": "run/"}
        spec |= {"endpoint": endpoint, "aws_region": "us-east-1"}
        yield ts.KvStore.open(spec, context=ts.Context()).result(timeout=30), server.seen
        server.shutdown()
        thread.join()


def test_tensorstore_writes_to_s3_under_a_condition_that_the_store_checks(s3):
    store, seen = s3
    stamp = store.write("key", b"1").result(timeout=30)
    del seen[:]
    store.write("key", b"2", if_equal=stamp.generation).result(timeout=30)
    assert ("PUT", _OneObject.etag) in seen


def test_tensorstore_deletes_from_s3_whatever_is_there_by_then(s3):
    store, seen = s3
    stamp = store.write("key", b"1").result(timeout=30)
    del seen[:]
    store.write("key", None, if_equal=stamp.generation).result(timeout=30)
    assert seen == [("HEAD", _OneObject.etag), ("DELETE", None)]
