"""Faults happen when, where and as often as ordered, and never otherwise."""

import http.client
import json
import threading

import pytest

from tests.gcs.errors import ApiError
from tests.gcs.faults import KINDS, Faults


class Client:
    """Plain requests, each on a connection of its own."""

    def __init__(self, gcs):
        self.gcs = gcs

    def ask(self, method, path, body=b"", headers=None):
        connection = http.client.HTTPConnection(self.gcs.server.host, self.gcs.server.port)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def put(self, name, data):
        path = f"/upload/storage/v1/b/{self.gcs.bucket}/o?uploadType=media&name={name}"
        return self.ask("POST", path, data)

    def get(self, name):
        return self.ask("GET", f"/{self.gcs.bucket}/{name}")

    def delete(self, name):
        return self.ask("DELETE", f"/storage/v1/b/{self.gcs.bucket}/o/{name}")

    def list(self):
        _, body = self.ask("GET", f"/storage/v1/b/{self.gcs.bucket}/o")
        return [item["name"] for item in json.loads(body).get("items", ())]


@pytest.fixture
def plain(gcs):
    return Client(gcs)


def test_status_is_answered_as_often_as_ordered_after_those_that_pass(gcs, plain):
    plain.put("key", b"value")
    fault = gcs.faults.add("status", status=429, operation=r"media\.get", skip=1, count=2)
    assert [plain.get("key")[0] for _ in range(5)] == [200, 429, 429, 200, 200]
    assert fault.fired == 2


def test_fault_keeps_to_its_operation_name_and_predicate(gcs, plain):
    gcs.faults.add("status", status=500, operation="upload", name=r"/manifests/", count=None)
    gcs.faults.add("status", status=501, predicate=lambda r: r.body.length == 3, count=None)
    assert plain.put("manifests/1", b"four")[0] == 500
    assert plain.put("other", b"four")[0] == 200
    assert plain.put("other", b"333")[0] == 501
    assert plain.get("other") == (200, b"four")


def test_name_of_a_multipart_upload_is_known_to_faults(gcs, plain):
    gcs.faults.add("status", status=500, name="/target$")
    body = b'--b\r\n\r\n{"name": "target"}\r\n--b\r\n\r\nvalue\r\n--b--'
    path = f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=multipart"
    headers = {"Content-Type": "multipart/related; boundary=b"}
    assert plain.ask("POST", path, body, headers)[0] == 500
    assert plain.ask("POST", path, body, headers)[0] == 200


def test_cut_upload_leaves_no_object_and_no_bytes(gcs, plain):
    gcs.faults.add("cut_upload", nbytes=1 << 20)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        plain.put("key", bytes(8 << 20))
    bucket = gcs.server.store.bucket(gcs.bucket)
    assert gcs.names() == []
    assert [line.status for line in gcs.server.requests if line.bucket == gcs.bucket] == [0]
    assert list((bucket.folder.path / "data").iterdir()) == []


def test_cut_download_ends_inside_the_body(gcs, plain):
    plain.put("key", bytes(5 << 20))
    gcs.faults.add("cut_download", nbytes=1000)
    with pytest.raises(http.client.IncompleteRead) as caught:
        plain.get("key")
    assert len(caught.value.partial) == 1000


def test_truncated_download_looks_whole(gcs, plain):
    plain.put("key", b"0123456789")
    gcs.faults.add("truncate", nbytes=4)
    assert plain.get("key") == (200, b"0123")
    assert plain.get("key") == (200, b"0123456789")


def test_lost_response_has_done_its_work(gcs, plain):
    gcs.faults.add("lost_response", operation="upload")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        plain.put("key", b"value")
    assert plain.get("key") == (200, b"value")


def test_stale_list_is_that_of_the_moment_of_the_order_and_reads_are_not_stale(gcs, plain):
    plain.put("deleted", b"1")
    plain.put("kept", b"1")
    gcs.faults.add("stale_list", skip=1, count=2)
    plain.put("new", b"1")
    plain.delete("deleted")
    assert plain.list() == ["kept", "new"]
    assert plain.get("new") == (200, b"1")
    assert plain.list() == ["deleted", "kept"]
    assert plain.get("deleted")[0] == 404
    assert plain.list() == ["deleted", "kept"]
    assert plain.list() == ["kept", "new"]


def test_stale_list_can_be_ordered_over_http(gcs, plain):
    status, _ = plain.ask("POST", "/_double/faults", b'{"kind": "stale_list"}')
    plain.put("new", b"1")
    assert status == 200
    assert [plain.list(), plain.list()] == [[], ["new"]]


def test_held_request_goes_on_when_released(gcs, plain):
    fault = gcs.faults.add("hold", operation="upload")
    answers = []
    thread = threading.Thread(target=lambda: answers.append(plain.put("key", b"value")[0]))
    thread.start()
    fault.wait()
    assert gcs.names() == []
    fault.release()
    thread.join(timeout=30)
    assert answers == [200]
    assert gcs.names() == ["key"]


@pytest.mark.parametrize(("kind", "names"), [("hang", []), ("mute", ["key"])])
def test_silent_request_is_never_answered_and_ends_when_released(gcs, plain, kind, names):
    fault = gcs.faults.add(kind, operation="upload")
    errors = []

    def put():
        try:
            plain.put("key", b"value")
        except (http.client.HTTPException, ConnectionError) as error:
            errors.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    fault.wait()
    thread.join(timeout=0.2)
    assert thread.is_alive()
    assert not errors
    fault.release()
    thread.join(timeout=30)
    assert errors
    assert gcs.names() == names
    assert plain.put("key", b"value")[0] == 200


def test_stalled_download_sends_its_part_and_no_end(gcs, plain):
    plain.put("key", b"0123456789")
    fault = gcs.faults.add("stall_download", name=f"^{gcs.bucket}/key$", nbytes=4)
    connection = http.client.HTTPConnection(gcs.server.host, gcs.server.port)
    connection.request("GET", f"/{gcs.bucket}/key")
    answer = connection.getresponse()
    assert (answer.headers["Content-Length"], answer.read(4)) == ("10", b"0123")
    connection.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        answer.read(1)
    fault.release()
    connection.close()
    assert plain.get("key") == (200, b"0123456789")


def test_clearing_lets_held_requests_go(gcs, plain):
    fault = gcs.faults.add("hold", count=None)
    thread = threading.Thread(target=plain.put, args=("key", b"value"))
    thread.start()
    fault.wait()
    gcs.faults.clear()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_slow_request_takes_its_time(gcs, plain):
    fault = gcs.faults.add("slow", seconds=0.05)
    assert plain.put("key", b"value")[0] == 200
    assert fault.fired == 1


def test_quota_counts_growth_only_and_answers_the_ordered_status(gcs, plain):
    gcs.set_quota(1000, status=507)
    assert plain.put("a", bytes(900))[0] == 200
    status, body = plain.put("b", bytes(101))
    assert (status, json.loads(body)["error"]["errors"][0]["reason"]) == (507, "quotaExceeded")
    assert plain.put("a", bytes(1000))[0] == 200
    assert plain.ask("DELETE", f"/storage/v1/b/{gcs.bucket}/o/a")[0] == 204
    assert plain.put("b", bytes(101))[0] == 200
    path = f"/storage/v1/b/{gcs.bucket}/o/b/copyTo/b/{gcs.bucket}/o/"
    assert [plain.ask("POST", f"{path}c{number}")[0] for number in range(9)] == [200] * 8 + [507]


def test_faults_and_quota_are_ordered_over_http(gcs, plain):
    order = {"kind": "status", "status": 503, "operation": "upload", "count": 1}
    status, body = plain.ask("POST", "/_double/faults", json.dumps(order).encode())
    number = json.loads(body)["id"]
    assert status == 200
    assert plain.put("key", b"value")[0] == 503
    _, body = plain.ask("GET", "/_double")
    assert [fault["fired"] for fault in json.loads(body)["faults"]] == [1]
    assert plain.ask("POST", f"/_double/faults/{number}/release")[0] == 204
    assert plain.ask("DELETE", f"/_double/faults/{number}")[0] == 204
    assert plain.ask("DELETE", f"/_double/faults/{number}")[0] == 404
    quota = {"bytes": 3, "bucket": gcs.bucket}
    assert plain.ask("PUT", "/_double/quota", json.dumps(quota).encode())[0] == 204
    assert plain.put("key", b"value")[0] == 403
    assert plain.ask("DELETE", "/_double/faults")[0] == 204
    assert plain.put("key", b"value")[0] == 200


def test_received_bytes_count_what_was_sent_and_not_what_was_copied(gcs, plain):
    def received():
        return json.loads(plain.ask("GET", "/_double")[1])["received_bytes"]

    before = received()
    plain.put("key", bytes(1000))
    copied = f"/storage/v1/b/{gcs.bucket}/o/key/copyTo/b/{gcs.bucket}/o/copy"
    assert plain.ask("POST", copied)[0] == 200
    assert received() - before == 1000


@pytest.mark.parametrize("order", [{"kind": "flood"}, {"kind": "slow", "colour": "red"}, {}])
def test_order_that_makes_no_sense_is_refused(plain, order):
    status, body = plain.ask("POST", "/_double/faults", json.dumps(order).encode())
    assert (status, b"known" in body) == (400, True)


def test_unknown_fault_is_refused_in_python_too():
    with pytest.raises(ApiError, match=", ".join(KINDS)):
        Faults().add("flood")
