"""The SDK against real gateways: limits, deadlines, traces, and processes that are killed."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import qlm
from qlm.api.v1.gateway_pb2 import SubmitRequest
from qlm.api.v1.gateway_pb2_grpc import GatewayStub
from qlm.api.v1.request_pb2 import Request
from qlm.errors import CallDeadlineExceeded, InvalidRequest, NotFound, QueueFull, Unavailable
from qlm_cli.operate.status import held_line
from qlm_core.vocabulary.request import RequestKey
from qlm_queue.values import Bounds, LiveRequest

from .gateway_rig import MODEL, PATIENCE_S, Rig, expected_tokens, open_rig

PROMPT = [5, 6, 7]


async def collect(stream: qlm.TokenStream) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


async def test_a_tenant_that_holds_too_many_bytes_is_refused_and_its_status_says_so(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Bounds(tenant_bytes_max=3_000)) as rig:
        gateway = await rig.gateway()
        async with qlm.AsyncClient(gateway.address) as client:
            await client.submit(MODEL, PROMPT, max_tokens=3)
            with pytest.raises(QueueFull) as full:
                await client.submit(MODEL, [5] * 3_000, max_tokens=3)
            shown = {each.bound: each for each in (await client.status()).held}
        assert (full.value.details["bound"], full.value.details["limit"]) == ("tenant_bytes", "3000")
        assert full.value.details["held"] == str(shown["tenant"].held) == str(shown["queue"].held)
        assert full.value.retry_after_s is not None
        assert held_line([shown["tenant"]]) == "tenant default 0.0 MB of 0 MB"


async def test_status_reports_the_loss_of_the_server(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        gateway = await rig.gateway()
        async with qlm.AsyncClient(gateway.address) as client:
            await client.submit(MODEL, PROMPT, max_tokens=3)
            assert (await client.status()).loss == ""
            server = redis.Redis.from_url(rig.server.url)
            await server.delete("{test}:acceptance")
            await server.aclose()
            deadline_s = time.monotonic() + 10.0
            while "has lost acknowledged requests" not in (await client.status()).loss:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.05)


async def test_a_full_queue_refuses_with_a_hint_and_takes_again_when_it_drains(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Bounds(queue_max=3, tenant_max=2)) as rig:
        gateway = await rig.gateway()
        async with qlm.AsyncClient(gateway.address) as client:
            for _ in range(2):
                await client.submit(MODEL, PROMPT, max_tokens=3)
            with pytest.raises(QueueFull) as full:
                await client.submit(MODEL, PROMPT, max_tokens=3)
            assert (full.value.details["bound"], full.value.details["limit"]) == ("tenant", "2")
            assert full.value.retry_after_s is not None
            assert 0.1 <= full.value.retry_after_s <= 300.0
            await client.submit(MODEL, PROMPT, max_tokens=3, tenant="other")
            with pytest.raises(QueueFull) as full:
                await client.submit(MODEL, PROMPT, tenant="third")
            assert full.value.details["bound"] == "queue"
            rig.serve()
            while True:
                try:
                    await client.submit(MODEL, PROMPT, max_tokens=3)
                    break
                except QueueFull:
                    await asyncio.sleep(0.01)
        shown = generate_latest(gateway.gateway.metrics.registry).decode()
        assert 'qlm_gateway_accepts_total{outcome="QUEUE_FULL"}' in shown
        assert 'qlm_gateway_accepts_total{outcome="accepted"} 4.0' in shown


async def test_one_trace_from_the_client_into_the_stored_request(rig: Rig) -> None:
    exporter = InMemorySpanExporter()
    rig.tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address, tracer_provider=rig.tracer_provider) as client:
        outer = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        await client.submit(MODEL, PROMPT, request_id="r", traceparent=outer, tracestate="k=v")
        with pytest.raises(NotFound):
            await client.submit("nothing", PROMPT)
    spans = {span.name: span for span in reversed(exporter.get_finished_spans())}
    request, accept = spans["qlm.client.request"], spans["qlm.gateway.accept"]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == "b" * 16
    assert accept.parent is not None
    assert accept.parent.span_id == request.context.span_id
    assert f"{accept.context.trace_id:032x}" == "a" * 32
    assert accept.attributes is not None
    assert (accept.attributes["qlm.request_id"], accept.attributes["qlm.model"]) == ("r", MODEL)
    stored = await rig.queue.find(RequestKey("default", "r"))
    assert isinstance(stored, LiveRequest)
    trace = Request.FromString(stored.body).trace
    assert trace.traceparent.split("-")[1:3] == ["a" * 32, f"{accept.context.span_id:016x}"]
    assert trace.tracestate == "k=v"
    assert len([span for span in exporter.get_finished_spans() if not span.status.is_ok]) == 2


async def test_the_trace_of_a_call_stands_in_for_that_of_the_request(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        message = SubmitRequest(request=Request(model=MODEL, text="hi", request_id="r"))
        traceparent = "00-" + "c" * 32 + "-" + "d" * 16 + "-01"
        await GatewayStub(channel).Submit(message, timeout=20.0, metadata=(("traceparent", traceparent),))
        message.request.request_id = "broken"
        await GatewayStub(channel).Submit(message, timeout=20.0, metadata=(("traceparent", "nonsense"), ("x-bin", b"\x00")))
    stored = await rig.queue.find(RequestKey("default", "r"))
    assert isinstance(stored, LiveRequest)
    assert Request.FromString(stored.body).trace.traceparent.split("-")[1] == "c" * 32


async def test_a_gateway_that_hangs_is_left_for_another(rig: Rig) -> None:
    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE_S)
        writer.close()

    gateway = await rig.gateway()
    rig.serve()
    silent = await asyncio.start_server(hang, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    try:
        async with qlm.AsyncClient([address, gateway.address], call_timeout_s=2.0) as client:
            assert await collect(client.generate(MODEL, PROMPT, max_tokens=4)) == expected_tokens(PROMPT, 4)
        async with qlm.AsyncClient([address], call_timeout_s=0.2, reconnect_attempts_max=1) as client:
            with pytest.raises((CallDeadlineExceeded, Unavailable)):
                await client.models()
    finally:
        silent.close()


async def test_nobody_there_is_reported_after_a_bounded_number_of_attempts() -> None:
    async with qlm.AsyncClient(["127.0.0.1:1", "127.0.0.1:2"], reconnect_attempts_max=3, reconnect_backoff_max_s=0.05) as client:
        with pytest.raises(Unavailable) as away:
            await collect(client.generate(MODEL, PROMPT))
        assert away.value.details["transport"] == "UNAVAILABLE"
        with pytest.raises(Unavailable):
            await client.submit(MODEL, PROMPT)


async def test_frames_that_are_lost_on_the_server_are_found_again(rig: Rig) -> None:
    gateway = await rig.gateway(stream_recheck_s=0.2)
    frames = f"{{test}}:frames:{gateway.gateway.gateway_id}"
    async with qlm.AsyncClient(gateway.address) as client, redis.Redis.from_url(rig.server.url) as server:
        stream = client.generate(MODEL, PROMPT, max_tokens=5)
        await stream.wait_accepted()
        await rig.agent.start_all()
        # All frames for this gateway vanish: its stream has another type from now on, as if it were trimmed at once.
        task = asyncio.create_task(collect(stream))
        for _ in range(4):
            await rig.agent.step()
            await server.delete(frames)
        await rig.agent.step()
        await server.delete(frames)
        assert await task == expected_tokens(PROMPT, 5)


async def test_bytes_that_are_no_frames_end_no_stream(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client, redis.Redis.from_url(rig.server.url) as server:
        stream = client.generate(MODEL, PROMPT, max_tokens=5)
        await stream.wait_accepted()
        await server.xadd(f"{{test}}:frames:{gateway.gateway.gateway_id}", {"f": b"\xff\xff\xff"})
        rig.serve()
        assert await collect(stream) == expected_tokens(PROMPT, 5)
    assert "qlm_gateway_frames_unreadable_total 1.0" in generate_latest(gateway.gateway.metrics.registry).decode()


async def test_health_follows_the_queue(rig: Rig) -> None:
    gateway = await rig.gateway()

    async def serving(channel: grpc.aio.Channel) -> bool:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(service="qlm.api.v1.Gateway"), timeout=20.0)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def becomes(channel: grpc.aio.Channel, wanted: bool) -> None:
        deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
        while await serving(channel) is not wanted:
            assert asyncio.get_running_loop().time() < deadline_s
            await asyncio.sleep(0.05)

    async with grpc.aio.insecure_channel(gateway.address) as channel:
        await becomes(channel, True)
        await rig.server.kill()
        await becomes(channel, False)
        await rig.server.start()
        await becomes(channel, True)


async def test_text_of_a_model_with_a_tokenizer_is_whole_across_gateways(rig: Rig, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["a fox"] * 9, trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet, show_progress=False))
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    one = await rig.gateway(tokenizer=str(path))
    two = await rig.gateway(tokenizer=str(path))
    answer = "ein Füchs 🦊 läuft"
    rig.agent.answer_of = lambda request: tokenizer.encode(answer).ids
    async with qlm.AsyncClient(one.address) as first, qlm.AsyncClient(two.address) as second:
        assert [model.token_count for model in await first.models()] == ["exact"]
        stream = first.generate(MODEL, "a fox", request_id="r")
        accepted = await stream.wait_accepted()
        assert accepted.prompt_tokens == len(tokenizer.encode("a fox").ids)
        await rig.agent.start_all()
        for _ in range(6):  # into the middle of a character
            await rig.agent.step()
        text = ""
        while stream.offset < 6:
            text += (await anext(stream)).text
        resumed = second.stream("r", stream.offset)
        rig.serve()
        async for chunk in resumed:
            text += chunk.text
        assert text == answer
        result = await second.result("r")
        assert result is not None
        assert result.text == answer
        with pytest.raises(InvalidRequest) as refused:
            await first.submit(MODEL, "fox " * 20_000)
        assert refused.value.reason == "PROMPT_TOO_LONG"


def test_wrong_settings_stop_the_process_with_their_name(capsys: pytest.CaptureFixture[str]) -> None:
    from qlm_gateway.__main__ import main

    assert main(["--set", "gateway.default_slo_s=-1"]) == 2
    assert "gateway.default_slo_s" in capsys.readouterr().err
    assert main(["--set", "nonsense"]) == 2
    assert main(["--help"]) == 0
    assert main(["--unknown"]) == 2
