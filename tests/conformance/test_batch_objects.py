"""Objects in a folder and in a bucket: one suite; and a bucket that does not answer."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from batch_places import PLACES, SECRET, aim_at, opened_place
from qlm_core.vocabulary.errors import ConfigError
from qlm_gateway.batches.objects import ObjectChanged, Objects, open_objects


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with opened_place(request.param, tmp_path / "place", monkeypatch) as opened:
        yield opened


@pytest.fixture
def objects(place: str) -> Objects:
    return open_objects(place)


def test_a_write_names_the_version_that_it_replaces(objects: Objects) -> None:
    with pytest.raises(FileNotFoundError):
        objects.read("a/b")
    with pytest.raises(ObjectChanged):
        objects.write("a/b", b"one", "1")
    objects.write("a/b", b"one")
    first = objects.read("a/b")
    assert first.content == b"one"
    objects.write("a/b", b"two", first.version)
    with pytest.raises(ObjectChanged):
        objects.write("a/b", b"three", first.version)
    assert objects.read("a/b").content == b"two"
    objects.delete("a/b")
    objects.delete("a/b")
    with pytest.raises(ObjectChanged):
        objects.write("a/b", b"four", first.version)


def test_names_are_those_below_a_folder_in_order(objects: Objects) -> None:
    assert objects.names("a") == []
    for name in ("a/2", "a/10", "ab/1", "a/%2E%2E/1", "a/2x"):
        objects.write(name, b"x" * len(name))
    assert objects.names("a") == [("a/%2E%2E/1", 10), ("a/10", 4), ("a/2", 3), ("a/2x", 4)]
    objects.delete("a/%2E%2E/1")
    assert [name for name, _ in objects.names("a")] == ["a/10", "a/2", "a/2x"]


def test_a_large_object_is_there_whole_or_not_at_all(objects: Objects) -> None:
    piece = b"a line of a large file\n" * 50_000
    for end in ("abort", "commit"):
        writer = objects.begin("large")
        digest = hashlib.sha256()
        for _ in range(20):
            writer.write(piece)
            digest.update(piece)
        with pytest.raises(FileNotFoundError):
            objects.open("large")
        getattr(writer, end)()
        writer.abort()
    with objects.open("large") as file:
        found = hashlib.sha256(first := file.readline(100))
        assert first == piece[:23]
        while read := file.read(1 << 20):
            found.update(read)
    assert found.digest() == digest.digest()
    objects.delete("large")
    with pytest.raises(FileNotFoundError):
        objects.open("large")


def test_an_empty_object_is_one(objects: Objects) -> None:
    objects.begin("empty").commit()
    with objects.open("empty") as file:
        assert file.read() == b""


# A bucket that does not answer ----------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = pytest.importorskip("qlm_gateway.batches.bucket")
    monkeypatch.setattr(bucket, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(bucket, "UPLOAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(bucket, "RETRY_FOR_S", 1.0)


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], environment: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            aim_at(f"http://127.0.0.1:{server.server_port}", environment)
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.usefixtures("quick")
def test_a_silent_bucket_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        aim_at(f"http://127.0.0.1:{listener.getsockname()[1]}", monkeypatch)
        objects = open_objects("s3://silent")
        for call in (partial(objects.read, "x"), partial(objects.write, "x", b"y"), partial(objects.names, "x"), objects.begin("x").commit):
            began_s = time.monotonic()
            with pytest.raises(OSError, match="does not answer"):
                call()
            assert time.monotonic() - began_s < 10.0


@pytest.mark.usefixtures("quick")
def test_a_bucket_is_called_again_a_few_times_and_no_error_names_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Failing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)
            status, body = (503, b"<Error><Code>SlowDown</Code></Error>") if len(calls) < 3 or "always" in self.path else (200, b"content")
            if "denied" in self.path:
                status, body = 403, f"<Error><Code>AccessDenied</Code>{self.headers}</Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Fri, 27 Nov 2026 17:00:00 GMT")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with served(Failing, monkeypatch):
        objects = open_objects("s3://failing")
        assert objects.read("x").content == b"content"
        assert len(calls) == 3
        for name, code in (("always", "SlowDown"), ("denied", "AccessDenied")):
            with pytest.raises(OSError, match=code) as refused:
                objects.read(name)
            assert SECRET not in repr(refused.value)
            assert "tester" not in repr(refused.value)
        assert len(calls) <= 3 + 5 + 1


@pytest.mark.usefixtures("quick")
def test_a_store_that_compares_versions_without_quotes_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unquoted(BaseHTTPRequestHandler):
        """As Ceph's."""

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200 if self.headers["If-Match"] == "1" else 412)
            self.send_header("Content-Length", "0")
            self.send_header("ETag", '"2"')
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with served(Unquoted, monkeypatch):
        objects = open_objects("s3://unquoted")
        objects.write("x", b"y", '"1"')
        with pytest.raises(ObjectChanged):
            objects.write("x", b"y", '"0"')


@pytest.mark.usefixtures("quick")
def test_an_upload_whose_end_was_not_seen_is_there_if_its_object_is(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 9 << 20

    class Late(BaseHTTPRequestHandler):
        """Completes an upload before its answer is lost: the retry finds none."""

        def reply(self, status: int, body: bytes = b"") -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(size if self.command == "HEAD" else len(body)))
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Fri, 27 Nov 2026 17:00:00 GMT")
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            begun = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            self.reply(*(200, begun) if self.path.endswith("?uploads=") else (404, b"<Error><Code>NoSuchUpload</Code></Error>"))

        def do_PUT(self) -> None:
            self.reply(200)

        def do_DELETE(self) -> None:
            self.reply(404)

        def do_HEAD(self) -> None:
            self.reply(404 if "gone" in self.path else 200)

        def log_message(self, *_: object) -> None:
            pass

    with served(Late, monkeypatch):
        for name, written, there in (("there", size, True), ("other", size - 1, False), ("gone", size, False)):
            writer = open_objects("s3://late").begin(name)
            writer.write(bytes(written))
            if there:
                writer.commit()
            else:
                with pytest.raises(OSError):  # noqa: PT011
                    writer.commit()
            writer.abort()


@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_uploads_that_are_aborted_leave_no_parts_and_a_missing_bucket_is_no_missing_file(place: str, objects: Objects) -> None:
    import boto3

    uploads = partial(boto3.client("s3").list_multipart_uploads, Bucket=place.split("/")[2])
    writer = objects.begin("x")
    for _ in range(20):
        writer.write(bytes(1 << 20))
    deadline_s = time.monotonic() + 20.0
    while "Uploads" not in uploads():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    writer.abort()
    assert "Uploads" not in uploads()
    with pytest.raises(OSError, match="bucket does not exist") as missing:
        open_objects("s3://no-such-bucket").read("x")
    assert not isinstance(missing.value, FileNotFoundError)
    with pytest.raises(ConfigError, match="s3://BUCKET/PREFIX"):
        open_objects("s3://")
