"""Keys and TLS at a gateway's faces: real gRPC, HTTP and server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import openai
import pytest
import structlog.testing
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

import qlm
from identity_files import add_key, make_certificates, revoke_key
from qlm.api.v1 import gateway_pb2
from qlm.credentials import Credentials
from qlm.errors import ConfigError, NotFound, PermissionDenied, QlmError, QueueFull, Unauthenticated, Unavailable
from qlm.wire_errors import from_rpc_error
from qlm_process.identity.keys import Role

from .gateway_rig import MODEL, PATIENCE_S, GatewayRun, Rig, until
from .http_rig import CHAT, HTTP, client_of, events_of

METHODS = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods
REVOKED_WITHIN_S = 5.0
ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/v1/requests/x"),
    ("DELETE", "/v1/requests/x"),
    ("GET", "/v1/nothing"),
)


@dataclass
class Door:
    """A gateway with keys. `acme`, `other`: of clients that may do all that clients may; `poor`: of one that may do little."""

    rig: Rig
    file: Path
    gateway: GatewayRun
    acme: str
    other: str
    poor: str
    operator: str
    service: str

    @property
    def url(self) -> str:
        return self.gateway.gateway.http_url

    def sdk(self, key: str, **options: Any) -> qlm.AsyncClient:
        return qlm.AsyncClient(self.gateway.address, credentials=Credentials(api_key=key), **options)

    def http(self, key: str) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        return aiohttp.ClientSession(self.url, timeout=timeout, headers={"Authorization": f"Bearer {key}"})


@pytest.fixture
async def door(rig: Rig, tmp_path: Path) -> Door:
    file = tmp_path / "keys.json"
    acme, other = add_key(file, "acme", priority_min=-1000), add_key(file, "other")
    poor = add_key(file, "poor", models=("another",), slo_s_min=120.0, priority_min=5)
    operator, service = add_key(file, "operator", Role.OPERATOR), add_key(file, "services", Role.SERVICE)
    gateway = await rig.gateway(security={"key_file": str(file)}, http={**HTTP, "objectives": {"premium": 10}})
    return Door(rig=rig, file=file, gateway=gateway, acme=acme, other=other, poor=poor, operator=operator, service=service)


async def error_of(address: str, method: str, request: Any, metadata: tuple[tuple[str, str], ...]) -> QlmError:
    """The error of a call that must fail."""
    descriptor = next(each for each in METHODS if each.name == method)
    async with grpc.aio.insecure_channel(address) as channel:
        make: Any = channel.unary_stream if descriptor.server_streaming else channel.unary_unary
        call = make(
            f"/qlm.api.v1.Gateway/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(descriptor.output_type).FromString,
        )(request, timeout=PATIENCE_S, metadata=metadata)
        try:
            await (call.read() if descriptor.server_streaming else call)
        except grpc.RpcError as failure:
            return from_rpc_error(failure)
        raise AssertionError(f"{method} was answered")


async def test_no_call_of_grpc_is_answered_without_a_key(door: Door) -> None:
    wrong = door.acme[:-1] + ("0" if door.acme[-1] != "0" else "1")
    for method in METHODS:
        for metadata in ((), (("authorization", f"Bearer {wrong}"),), (("authorization", door.acme),)):
            error = await error_of(door.gateway.address, method.name, GetMessageClass(method.input_type)(), metadata)
            assert (type(error), error.reason) == (Unauthenticated, "UNAUTHENTICATED"), method.name
        error = await error_of(
            door.gateway.address, method.name, GetMessageClass(method.input_type)(), Credentials(api_key=door.service).metadata
        )
        assert type(error) is PermissionDenied, method.name
    async with grpc.aio.insecure_channel(door.gateway.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_no_route_of_http_is_answered_without_a_key(door: Door) -> None:
    async with aiohttp.ClientSession(door.url) as session:
        for method, path in ROUTES:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": door.acme}):
                async with session.request(method, path, headers=headers, json=CHAT) as answer:
                    body = await answer.json()
                    assert (answer.status, body["error"]["code"]) == (401, "invalid_api_key"), path
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/health", "/readiness"):
            async with session.get(path) as answer:
                assert answer.status == 200
    async with client_of(door.url) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**CHAT)
    door.rig.serve()
    async with client_of(door.url).with_options(api_key=door.acme) as client:
        assert (await client.chat.completions.create(**CHAT)).choices[0].message.content


async def test_the_tenant_is_the_keys_and_no_other_is_seen(door: Door) -> None:
    async with door.sdk(door.acme) as acme, door.sdk(door.other) as other:
        accepted = await acme.submit(MODEL, [1, 2], max_tokens=4)
        assert accepted.tenant == "acme"
        for claim in ("other", "default"):
            with pytest.raises(PermissionDenied, match="tenant"):
                await acme.submit(MODEL, [1], tenant=claim)
            with pytest.raises(PermissionDenied, match="tenant"):
                await anext(aiter(acme.generate(MODEL, [1], tenant=claim)))

        async def failures(client: qlm.AsyncClient, request_id: str, tenant: str | None) -> list[tuple[type, str, str, dict[str, str]]]:
            found = []
            for call in (client.result, client.cancel, client.status):
                with pytest.raises(NotFound) as error:
                    await call(request_id, tenant=tenant)
                found.append((type(error.value), error.value.reason, error.value.message, error.value.details))
            with pytest.raises(NotFound) as error:
                await anext(aiter(client.stream(request_id, tenant=tenant)))
            return [*found, (type(error.value), error.value.reason, error.value.message, error.value.details)]

        for tenant in (None, "acme"):
            there = await failures(other, accepted.request_id, tenant)
            missing = await failures(other, "a" * len(accepted.request_id), tenant)
            for one, another in zip(there, missing, strict=True):
                assert one[:3] == another[:3]
                assert {**one[3], "request_id": ""} == {**another[3], "request_id": ""}
        async with door.http(door.other) as session:
            for method in ("GET", "DELETE"):
                async with session.request(method, f"/v1/requests/{accepted.request_id}") as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unknown_request")
            # The same id is another request, and the tenant is no header's.
            headers = {"Idempotency-Key": accepted.request_id, "x-qlm-mode": "enqueue", "x-llm-d-inference-fairness-id": "acme"}
            async with session.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
                assert answer.status == 202
        state = (await acme.status(accepted.request_id)).request
        assert state is not None
        assert not state.state.terminal
        page = await other.requests()
        assert [each.tenant for each in page.requests] == ["other"]
        with pytest.raises(PermissionDenied):
            await other.requests(tenant="acme")


async def test_a_key_holds_its_requests_to_its_limits(door: Door) -> None:
    async with door.sdk(door.poor) as poor:
        with pytest.raises(PermissionDenied, match=f"model: .*{MODEL}"):
            await poor.submit(MODEL, [1])
        assert await poor.models() == ()
    async with door.http(door.poor) as session:
        async with session.post("/v1/chat/completions", json=CHAT) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (403, "model")
        async with session.get(f"/v1/models/{MODEL}") as answer:
            assert answer.status == 404
    key = add_key(door.file, "slow", models=(MODEL,), slo_s_min=120.0, priority_min=5)
    plain = add_key(door.file, "plain")
    async with door.sdk(key) as slow, door.sdk(plain) as without:
        await known(slow)
        await known(without)
        for slo in (qlm.Slo.completion(119), qlm.Slo.first_token(1), qlm.Slo.priority_of(4)):
            with pytest.raises(PermissionDenied, match=r"slo\.") as error:
                await slow.submit(MODEL, [1], slo=slo)
            assert error.value.details["field"] in ("slo.seconds", "slo.priority")
        for allowed in (qlm.Slo.completion(120), qlm.Slo.priority_of(5)):
            await slow.submit(MODEL, [1], slo=allowed)
        status = await slow.status((await slow.submit(MODEL, [1])).request_id)
        assert status.request is not None
        assert status.request.slo == qlm.Slo.completion(120)  # the default is less
        with pytest.raises(PermissionDenied, match=r"slo\.priority"):
            await without.submit(MODEL, [1], slo=qlm.Slo.priority_of(1000))
    async with door.http(key) as session:
        for headers, param in (
            ({"x-qlm-slo-seconds": "5"}, "x-qlm-slo-seconds"),
            ({"x-llm-d-slo-ttft-ms": "5000"}, "x-llm-d-slo-ttft-ms"),
            ({"x-qlm-priority": "1"}, "x-qlm-priority"),
            ({"x-llm-d-inference-objective": "premium"}, "x-llm-d-inference-objective"),
        ):
            async with session.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
                assert (answer.status, (await answer.json())["error"]["param"]) == (403, param)


async def test_control_and_the_status_of_all_are_for_operators(door: Door) -> None:
    async with door.sdk(door.acme) as acme, door.sdk(door.other) as other, door.sdk(door.operator) as operator:
        accepted = await acme.submit(MODEL, [1], max_tokens=4)
        for call in (acme.pause, acme.resume):
            with pytest.raises(PermissionDenied):
                await call(model=MODEL)
        assert await operator.pause(tenant="acme")
        seen, whole = await other.status(), await operator.status()
        assert (seen.pauses, seen.held, seen.virtual_queues, seen.live) == ((), (), (), 0)
        assert whole.live == 1
        assert [each.tenant for each in whole.pauses] == ["acme"]
        assert [each.tenant for each in (await acme.status()).pauses] == ["acme"]
        assert [each.tenant for each in (await operator.requests()).requests] == ["acme"]
        found = await operator.status(accepted.request_id, tenant="acme")
        assert found.request is not None
        with pytest.raises(NotFound):  # its output is its tenant's alone
            await operator.result(accepted.request_id, 0, tenant="acme")
        assert (await operator.cancel(accepted.request_id, tenant="acme")).terminal
        assert await operator.resume(tenant="acme")


async def known(client: qlm.AsyncClient) -> None:
    """Waits until the gateway has read the client's key."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await client.models()
                return
            except Unauthenticated:
                await asyncio.sleep(0.02)


async def test_a_revoked_key_ends_its_streams_and_no_other(door: Door) -> None:
    agent = door.rig.agent
    async with door.sdk(door.acme) as acme, door.sdk(door.other) as other, door.http(door.acme) as session:
        kept, ended = other.generate(MODEL, [1], max_tokens=40), acme.generate(MODEL, [2], max_tokens=40)
        request_id = (await acme.submit(MODEL, [3], max_tokens=40)).request_id
        resumed, waited = acme.stream(request_id), asyncio.create_task(acme.result(request_id, PATIENCE_S))
        await kept.wait_accepted(), await ended.wait_accepted()
        async with session.post("/v1/chat/completions", json={**CHAT, "max_tokens": 40, "stream": True}) as events:
            await agent.start_all()
            await agent.step()
            assert [(await anext(each)).count for each in (ended, kept, resumed)] == [1, 1, 1]
            await events_of(events, 2)
            loop = asyncio.get_running_loop()
            started_s = loop.time()
            revoke_key(door.file, door.acme)
            for each in (ended, resumed):
                with pytest.raises(Unauthenticated):
                    await anext(each)
            with pytest.raises(Unauthenticated):
                await waited
            ((_, error),) = await events_of(events, 1)
            assert "invalid_api_key" in error
            assert loop.time() - started_s < REVOKED_WITHIN_S
        with pytest.raises(Unauthenticated):
            await acme.submit(MODEL, [4])
        await agent.step()
        assert (await anext(kept)).count == 1
        assert len(agent.running) == 4  # accepted requests continue
        assert await until_readers(door) == 1


async def until_readers(door: Door) -> int:
    hub = door.gateway.gateway._hub
    await until(lambda: len(hub._streams) == 1, "streams of the revoked key are closed")
    return len(hub._streams)


async def test_a_file_that_cannot_be_read_leaves_the_keys(door: Door) -> None:
    text = door.file.read_text()
    async with door.sdk(door.acme) as acme:
        for spoil in (lambda: door.file.write_text("{"), door.file.unlink):
            with structlog.testing.capture_logs() as logs:
                spoil()
                await until(lambda logs=logs: any(each["event"] == "key_file_wrong" for each in logs), "the file is reported")  # type: ignore[misc]
            assert await acme.models()
            with structlog.testing.capture_logs() as logs:
                door.file.write_text(text)
                await until(lambda logs=logs: any(each["event"] == "keys_read" for each in logs), "the file is read")  # type: ignore[misc]
        new = add_key(door.file, "new")
    async with door.sdk(new) as client:
        await known(client)
        assert (await client.submit(MODEL, [1])).tenant == "new"


@pytest.mark.parametrize("setting", ["listen", "http"])
async def test_other_hosts_want_keys_and_tls(rig: Rig, setting: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"listen": "0.0.0.0:0"} if setting == "listen" else {"http": {"listen": "0.0.0.0:0"}}
    with pytest.raises(ConfigError, match=r"listen: .*security\.key_file.*security\.no_auth"):
        await rig.gateway(**settings)
    add_key(tmp_path / "keys", "acme")
    with pytest.raises(ConfigError, match=r"listen: .*tls_cert_file"):
        await rig.gateway(security={"key_file": str(tmp_path / "keys")}, **settings)


@asynccontextmanager
async def session_of(url: str, context: ssl.SSLContext, key: str) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(url, headers=headers, connector=aiohttp.TCPConnector(ssl=context)) as session:
        yield session


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual"])
async def test_tls_at_both_faces(rig: Rig, tmp_path: Path, mutual: bool) -> None:
    own, foreign = make_certificates(tmp_path / "own"), make_certificates(tmp_path / "foreign")
    key = add_key(tmp_path / "keys", "acme")
    security = {"key_file": str(tmp_path / "keys"), **own.settings(), **({"tls_client_ca_file": own.ca} if mutual else {})}
    gateway = await rig.gateway(security=security, http=HTTP)
    rig.serve()
    shown = {"cert_file": own.cert, "cert_key_file": own.key} if mutual else {}
    async with qlm.AsyncClient(gateway.address, credentials=Credentials(api_key=key, ca_file=own.ca, **shown)) as client:
        assert [chunk.count async for chunk in client.generate(MODEL, [1, 2], max_tokens=3)]
    refused = [Credentials(api_key=key), Credentials(api_key=key, ca_file=foreign.ca, **shown)]
    if mutual:
        theirs = {"cert_file": foreign.cert, "cert_key_file": foreign.key}
        refused += [Credentials(api_key=key, ca_file=own.ca), Credentials(api_key=key, ca_file=own.ca, **theirs)]
    for credentials in refused:
        async with qlm.AsyncClient(gateway.address, credentials=credentials, call_timeout_s=2.0, reconnect_attempts_max=0) as client:
            with pytest.raises(Unavailable):
                await client.models()

    context = ssl.create_default_context(cafile=own.ca)
    url = gateway.gateway.http_url
    assert url.startswith("https://")
    if mutual:
        async with session_of(url, context, key) as session:
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await session.get("/v1/models")
        context = ssl.create_default_context(cafile=own.ca)
        context.load_cert_chain(own.cert, own.key)
    async with session_of(url, context, key) as session, session.post("/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200
    async with session_of(url, ssl.create_default_context(cafile=foreign.ca), key) as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get("/v1/models")


async def test_a_key_that_has_used_up_its_rate_is_refused_at_both_faces_with_a_hint(door: Door) -> None:
    with structlog.testing.capture_logs() as logs:
        limited = add_key(door.file, "limited", requests_per_min=2.0)
        await until(lambda: any(each["event"] == "keys_read" for each in logs), "the new key is read")
    async with door.sdk(limited) as client, door.http(limited) as http:
        for number in range(2):
            await client.submit(MODEL, "a prompt", slo_s=60.0, request_id=f"r{number}")
        with pytest.raises(QueueFull) as refused:
            await client.submit(MODEL, "a prompt", slo_s=60.0)
        assert refused.value.reason == "RATE_LIMITED"
        assert 20.0 < (refused.value.retry_after_s or 0.0) <= 30.0
        async with http.post("/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 429
            assert 20 < int(answer.headers["Retry-After"]) <= 30
            left = {name: answer.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")}
            assert (left["limit"], left["remaining"]) == ("2", "0")
            assert 30.0 < float(left["reset"].removesuffix("s")) <= 60.0
            error = (await answer.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limited")
    async with door.sdk(door.other) as client:
        await client.submit(MODEL, "a prompt", slo_s=60.0)


async def test_a_key_has_so_many_streams_at_once(door: Door) -> None:
    few = add_key(door.file, "few", streams_max=1)
    async with door.sdk(few) as client, door.http(few) as http:
        await known(client)
        stream = client.generate(MODEL, [1, 2], max_tokens=3)
        await stream.wait_accepted()
        async with http.post("/v1/chat/completions", json=CHAT) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (429, "rate_limited")
            assert answer.headers["retry-after-ms"] == "500"
        submitted = await client.submit(MODEL, [1])  # nobody waits for it
        assert await client.result(submitted.request_id, 0) is None
        with pytest.raises(QueueFull):
            await client.result(submitted.request_id, 1)
        door.rig.serve()
        assert sum([chunk.count async for chunk in stream]) == 3
        async with asyncio.timeout(PATIENCE_S):  # the call ends just after its last message
            while (await http.post("/v1/chat/completions", json=CHAT)).status != 200:
                await asyncio.sleep(0.01)
