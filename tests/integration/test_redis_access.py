"""TLS, a user and the least rights: what docs/reference/server.md gives the user is enough for everything, and for nothing else."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio as redis

from identity_files import Certificates, make_certificates
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.request import RequestState
from qlm_queue.redis.queue import RedisQueue
from small_cluster import SmallCluster

from .own_server import Server, free_port, need_redis_server

SECURE = Path(__file__).parents[2] / "docs" / "reference" / "server.md"
SECRET = "correct horse"


def documented_user() -> list[str]:
    """The command of the page that makes the user, with a password."""
    text = re.search(r"ACL SETUSER qlm((?:.*\\\n)*.*)\n", SECURE.read_text())
    assert text is not None
    return ["ACL", "SETUSER", "qlm", *(word.replace("PASSWORD", SECRET) for word in shlex.split(text[1].replace("\\\n", " ")))]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "certificates")


@pytest.fixture
def server(tmp_path: Path, certificates: Certificates) -> Iterator[tuple[Server, int]]:
    need_redis_server()
    server, tls_port = Server(tmp_path), free_port()
    server.start(
        "--tls-port", str(tls_port), "--tls-cert-file", certificates.cert, "--tls-key-file", certificates.key,
        "--tls-ca-cert-file", certificates.ca, "--tls-auth-clients", "no", "--stream-node-max-entries", "1",
    )  # fmt: skip
    yield server, tls_port
    server.stop()


async def test_the_documented_user_has_all_rights_that_a_queue_needs_over_tls(
    server: tuple[Server, int], certificates: Certificates
) -> None:
    plain, tls_port = server
    admin = redis.Redis.from_url(plain.url, protocol=2)
    await admin.execute_command(*documented_user())  # type: ignore[no-untyped-call]
    await admin.execute_command("ACL", "SETUSER", "default", "off")  # type: ignore[no-untyped-call]
    url = f"rediss://qlm:{SECRET.replace(' ', '%20')}@127.0.0.1:{tls_port}/0?ssl_ca_certs={certificates.ca}"
    queue = RedisQueue(url)
    await queue.start()
    cluster = SmallCluster(queue, random.Random(1))
    await cluster.submit(12)
    assert await cluster.finish(), "with repairs"
    assert {await cluster.end_of(key) for key in cluster.keys} == {RequestState.COMPLETED}
    assert await queue.erase(cluster.keys[0], b"") is RequestState.COMPLETED
    await queue.report([])
    await queue.read_frames("g", "0", 0.0)
    assert await queue.read_events("0", 0.0, 10), "events were written"
    await queue.server_time_s()
    assert await queue.read_profiles() == (0, b"")
    await queue.stop()
    denied = [entry for entry in await admin.acl_log() if entry["username"] == "qlm"]
    assert not denied, "a right that the page forgets"
    async with redis.Redis.from_url(url, protocol=2) as client:
        for command in (("GET", "other"), ("GET", "{other}:acceptance"), ("FLUSHALL",), ("CONFIG", "SET", "maxmemory", "1"), ("KEYS", "*")):
            with pytest.raises(redis.ResponseError, match="no permissions"):
                await client.execute_command(*command)  # type: ignore[no-untyped-call]
    await admin.aclose()


async def test_a_wrong_password_or_an_unknown_authority_is_refused(server: tuple[Server, int], certificates: Certificates) -> None:
    plain, tls_port = server
    async with redis.Redis.from_url(plain.url, protocol=2) as admin:
        await admin.execute_command(*documented_user())  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="refuses") as refused:
        await RedisQueue(f"rediss://qlm:wrong@127.0.0.1:{tls_port}/0?ssl_ca_certs={certificates.ca}").start()
    assert "wrong" not in str(refused.value)
    with pytest.raises(Exception, match="certificate verify failed"):
        await RedisQueue(f"rediss://qlm:{SECRET}@127.0.0.1:{tls_port}/0".replace(" ", "%20")).start()
