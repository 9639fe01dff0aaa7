"""The double as a process: ready, ended cleanly or killed, and back with all that it stored."""

import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.gcs.errors import FolderInUseError
from tests.gcs.folder import SESSION_LIFETIME_SECONDS
from tests.gcs.server import GcsServer
from tests.gcs.store import GenerationClock, Store

UPLOAD = "/upload/storage/v1/b/kept/o?uploadType=media&name="


def test_restart_keeps_objects_and_generations_and_numbers_go_on(start_process):
    first = start_process()
    _, _, body = first.request("POST", UPLOAD + "a%2Fb", b"payload", {"Content-Type": "x/y"})
    before = json.loads(body)
    port = str(first.port)
    assert first.stop(signal.SIGTERM) == 0

    second = start_process("--port", port)
    assert (second.ready["event"], second.port) == ("ready", int(port))
    _, _, body = second.request("GET", "/storage/v1/b/kept/o/a%2Fb")
    assert json.loads(body) == before
    condition = f"&ifGenerationMatch={before['generation']}"
    status, _, body = second.request("POST", UPLOAD + "a%2Fb" + condition, b"new")
    assert (status, int(json.loads(body)["generation"]) > int(before["generation"])) == (200, True)
    assert second.request("GET", "/kept/a/b")[2] == b"new"
    assert second.stop(signal.SIGINT) == 0


def test_kill_during_an_upload_leaves_no_object_and_no_bytes(start_process, tmp_path):
    folder = tmp_path / "store" / "buckets" / "kept"
    staging = folder / "staging"
    first = start_process()
    first.request("POST", UPLOAD + "kept", b"payload")
    with socket.create_connection(("127.0.0.1", first.port)) as half:
        half.sendall(f"POST {UPLOAD}half HTTP/1.1\r\nContent-Length: 90000000\r\n\r\n".encode())
        half.sendall(bytes(45_000_000))  # more than the sockets hold: the server has taken most
        assert [file.stat().st_size > 0 for file in staging.iterdir()] == [True]
        first.request("POST", UPLOAD + "kept", b"payload 2")
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    assert list(staging.iterdir()) != []

    second = start_process()
    _, _, body = second.request("GET", "/storage/v1/b/kept/o")
    assert [item["name"] for item in json.loads(body)["items"]] == ["kept"]
    assert second.request("GET", "/kept/kept")[2] == b"payload 2"
    assert len(list((folder / "data").iterdir())) == 1
    assert list(staging.iterdir()) == []


def test_resumable_upload_goes_on_after_a_kill(start_process):
    first = start_process()
    path = "/upload/storage/v1/b/kept/o?uploadType=resumable&name=object"
    _, headers, _ = first.request("POST", path, b'{"metadata": {"kind": "test"}}')
    session = "/" + headers["Location"].split("/", 3)[3]
    data = bytes(range(256)) * 2048
    half = len(data) // 2
    first.request("PUT", session, data[:half], {"Content-Range": f"bytes 0-{half - 1}/*"})
    first.stop(signal.SIGKILL)

    second = start_process()
    status, headers, _ = second.request("PUT", session, b"", {"Content-Range": "bytes */*"})
    assert (status, headers["Range"]) == (308, f"bytes=0-{half - 1}")
    rest = {"Content-Range": f"bytes {half}-{len(data) - 1}/{len(data)}"}
    status, _, body = second.request("PUT", session, data[half:], rest)
    assert (status, json.loads(body)["metadata"]) == (200, {"kind": "test"})
    assert second.request("GET", "/kept/object")[2] == data
    second.stop(signal.SIGKILL)

    third = start_process()
    status, _, again = third.request("PUT", session, b"", {"Content-Range": "bytes */*"})
    assert (status, json.loads(again)["generation"]) == (200, json.loads(body)["generation"])


def test_second_server_on_one_folder_is_refused(tmp_path):
    with GcsServer(tmp_path), pytest.raises(FolderInUseError, match=str(tmp_path)):
        Store(tmp_path)
    Store(tmp_path).close()


def test_closing_ends_open_connections(tmp_path):
    server = GcsServer(tmp_path).start()
    connection = http.client.HTTPConnection(server.host, server.port)
    connection.request("GET", "/storage/v1/b")
    connection.getresponse().read()
    server.close()
    assert connection.sock.recv(1) == b""
    connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((server.host, server.port))
    server.close()


def test_generations_grow_when_the_clock_goes_back_and_over_restarts(tmp_path):
    times = iter([5.0, 4.0, 4.0, 3.0])
    clock = GenerationClock(tmp_path / "generation", now=lambda: next(times))
    first = [clock.next() for _ in range(3)]
    after = GenerationClock(tmp_path / "generation", now=lambda: next(times)).next()
    assert first == [5_000_000, 5_000_001, 5_000_002]
    assert after > first[-1]


def test_what_a_crash_left_is_removed_at_the_next_start(tmp_path):
    store = Store(tmp_path)
    folder: Path = store.create_bucket("bucket").folder.path
    store.close()
    left = ["data/123", "meta/x.json.0.tmp", "staging/a.part", "staging/session-1.json.0.tmp"]
    going_on, forgotten = "staging/session-1.part", "staging/session-2.part"
    for name in [*left, going_on, forgotten]:
        (folder / name).write_bytes(b"half")
    long_ago = time.time() - SESSION_LIFETIME_SECONDS - 60
    os.utime(folder / forgotten, (long_ago, long_ago))
    Store(tmp_path).close()
    assert [name for name in [*left, forgotten] if (folder / name).exists()] == []
    assert (folder / going_on).exists()
