"""Where batches lie in tests: a folder, and a bucket of an S3 server on loopback."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PLACES = ("folder", "bucket")
SECRET = "no-log-may-hold-this"


@contextmanager
def opened_place(kind: str, folder: Path, environment: pytest.MonkeyPatch) -> Iterator[str]:
    """Setting `gateway.batches.folder`. QLM_TEST_S3: endpoint of a store to test in place of moto, whose user `tester` has `SECRET`.
    Skips the test where a package for buckets is missing; in CI that is a failure."""
    if kind == "folder":
        yield str(folder)
        return
    try:
        import boto3
        import obstore  # noqa: F401
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        if os.environ.get("CI"):
            pytest.fail(f"no {error.name}: pip install qlm-serving[dev]")
        pytest.skip(f"no {error.name}")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        aim_at(os.environ.get("QLM_TEST_S3") or f"http://{host}:{port}", environment)
        bucket = f"qlm-{secrets.token_hex(4)}"
        boto3.client("s3").create_bucket(Bucket=bucket)
        yield f"s3://{bucket}/some/prefix"
    finally:
        server.stop()


def aim_at(endpoint: str, environment: pytest.MonkeyPatch) -> None:
    """Has new clients of S3 call this endpoint."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }.items():
        environment.setenv(name, value)
