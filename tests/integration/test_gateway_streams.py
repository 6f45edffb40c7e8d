"""Gateway and SDK on a real queue: tokens arrive once and in order, whatever dies on the way."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import qlm
from qlm.errors import NotFound, OffsetOutOfRange, RequestEnded, RequestIdConflict, Unavailable
from qlm.values import RequestState

from .gateway_rig import MODEL, PATIENCE_S, Rig, expected_logprobs, expected_tokens, piece_of, until

PROMPT = [5, 6, 7]


async def collect(stream: qlm.TokenStream) -> list[int]:
    tokens: list[int] = []
    async for chunk in stream:
        assert chunk.offset + len(chunk.token_ids) == stream.offset
        tokens.extend(chunk.token_ids)
    return tokens


async def test_generate_streams_every_token_once_and_then_the_result(rig: Rig) -> None:
    gateway = await rig.gateway()
    rig.serve()
    async with qlm.AsyncClient(gateway.address) as client:
        stream = client.generate(MODEL, PROMPT, max_tokens=40, slo_s=30.0, request_id="r1")
        assert await collect(stream) == expected_tokens(PROMPT, 40)
        assert stream.accepted is not None
        assert stream.accepted.request_id == "r1"
        assert not stream.accepted.duplicate
        assert stream.accepted.prompt_tokens == 3
        assert stream.result is not None
        assert stream.result.state is RequestState.COMPLETED
        assert stream.result.finish_reason == "length"
        assert stream.result.output_tokens == 40
        assert stream.result.token_ids == ()
        result = await client.result("r1")
        assert result is not None
        assert list(result.token_ids) == expected_tokens(PROMPT, 40)
        assert result.text.startswith(f" t{expected_tokens(PROMPT, 1)[0]}")


async def test_the_same_id_is_the_same_request_and_another_body_is_refused(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        first = await client.submit(MODEL, PROMPT, max_tokens=5, request_id="same")
        again = await client.submit(MODEL, PROMPT, max_tokens=5, request_id="same")
        assert (again.queue_id, again.duplicate) == (first.queue_id, True)
        with pytest.raises(RequestIdConflict):
            await client.submit(MODEL, PROMPT, max_tokens=6, request_id="same")
        rig.serve()
        # Also after its end, and as a stream from the first token.
        assert await collect(client.generate(MODEL, PROMPT, max_tokens=5, request_id="same")) == expected_tokens(PROMPT, 5)
        assert await collect(client.generate(MODEL, PROMPT, max_tokens=5, request_id="same")) == expected_tokens(PROMPT, 5)
        with pytest.raises(RequestIdConflict):
            await client.submit(MODEL, [1], request_id="same")


async def test_stream_continues_at_an_offset_on_another_gateway(rig: Rig) -> None:
    one, two = await rig.gateway(), await rig.gateway()
    async with qlm.AsyncClient(one.address) as first, qlm.AsyncClient(two.address) as second:
        stream = first.generate(MODEL, PROMPT, max_tokens=20, request_id="r")
        await stream.wait_accepted()
        await rig.agent.start_all()
        await rig.agent.step(6)
        chunk = await anext(stream)
        assert list(chunk.token_ids) == expected_tokens(PROMPT, 6)
        resumed = second.stream("r", offset=4)
        assert list((await anext(resumed)).token_ids) == expected_tokens(PROMPT, 6)[4:]
        await rig.agent.step(4)
        assert list((await anext(resumed)).token_ids) == expected_tokens(PROMPT, 10)[6:]
        # The first gateway lost the frames to the second, and still sees the request through.
        rest = asyncio.create_task(collect(stream))
        await rig.agent.step(10)
        assert await collect(resumed) == expected_tokens(PROMPT, 20)[10:]
        assert await rest == expected_tokens(PROMPT, 20)[6:]


@pytest.mark.parametrize("top", [0, 3])
async def test_logprobs_arrive_with_their_tokens(rig: Rig, top: int) -> None:
    """In frames, from the middle of what is stored while it runs and after its end, and in the result."""
    one, two = await rig.gateway(), await rig.gateway()
    tokens = expected_tokens(PROMPT, 20)
    expected = expected_logprobs(tokens, top)
    async with qlm.AsyncClient(one.address) as first, qlm.AsyncClient(two.address) as second:
        stream = first.generate(MODEL, PROMPT, max_tokens=20, logprobs=top, request_id="r")
        await stream.wait_accepted()
        await rig.agent.start_all()
        await rig.agent.step(6)
        assert (await anext(stream)).logprobs == expected[:6]
        moved = second.stream("r", offset=4)
        assert (await anext(moved)).logprobs == expected[4:6]
        await rig.agent.step(14)
        assert [each async for chunk in stream for each in chunk.logprobs] == list(expected[6:])
        assert [each async for chunk in moved for each in chunk.logprobs] == list(expected[6:])
        assert [each async for chunk in first.stream("r", offset=17) for each in chunk.logprobs] == list(expected[17:])
        result = await second.result("r")
        assert result is not None
        assert (list(result.token_ids), result.logprobs) == (tokens, expected)
        assert stream.result is not None
        assert stream.result.logprobs == ()


async def test_logprobs_of_an_answer_longer_than_a_message(rig: Rig) -> None:
    gateway = await rig.gateway()
    expected = expected_logprobs(expected_tokens(PROMPT, 3_000), 1)
    async with qlm.AsyncClient(gateway.address) as client:
        await client.submit(MODEL, PROMPT, max_tokens=3_000, logprobs=1, request_id="r")
        await rig.agent.start_all()
        await rig.agent.step(3_000)
        chunks = [chunk async for chunk in client.stream("r")]
        assert len(chunks) > 1
        for chunk in chunks:
            assert chunk.logprobs == expected[chunk.offset : chunk.offset + chunk.count]


async def test_text_is_read_from_any_piece(rig: Rig) -> None:
    """From an engine that reports only text: as it arrives, from stored output in the middle, and after the end."""
    gateway = await rig.gateway()
    rig.agent.text_output = True
    pieces = [piece_of(token) for token in expected_tokens(PROMPT, 40)]
    async with qlm.AsyncClient(gateway.address) as client:
        stream = client.generate(MODEL, PROMPT, max_tokens=40, request_id="r")
        await stream.wait_accepted()
        await rig.agent.start_all()
        await rig.agent.step(30)
        for offset in (0, 1, 17, 29):
            assert [*(await anext(client.stream("r", offset=offset))).pieces] == pieces[offset:30]
        with pytest.raises(OffsetOutOfRange):
            await anext(client.stream("r", offset=31))
        follows = client.stream("r", offset=30)
        rest = asyncio.create_task(anext(follows))
        await rig.agent.step(10)
        assert [*(await rest).pieces] == pieces[30:]
        assert [piece async for chunk in stream for piece in chunk.pieces] == pieces
        for offset in (0, 13, 39):
            assert [piece async for chunk in client.stream("r", offset=offset) for piece in chunk.pieces] == pieces[offset:]
        with pytest.raises(OffsetOutOfRange):
            await anext(client.stream("r", offset=41))


async def test_several_readers_of_one_request(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        stream = client.generate(MODEL, PROMPT, max_tokens=30, request_id="r")
        await stream.wait_accepted()
        await rig.agent.start_all()
        await rig.agent.step(3)
        others = [asyncio.create_task(collect(client.stream("r", offset=offset))) for offset in (0, 2, 3)]
        waiter = asyncio.create_task(client.result("r", wait_s=20.0))
        own = asyncio.create_task(collect(stream))
        for _ in range(27):
            await rig.agent.step()
        whole = expected_tokens(PROMPT, 30)
        assert await own == whole
        assert [await other for other in others] == [whole, whole[2:], whole[3:]]
        result = await waiter
        assert result is not None
        assert list(result.token_ids) == whole


async def test_a_draining_gateway_is_not_ready_takes_nothing_and_lets_streams_finish(rig: Rig) -> None:
    gateway = await rig.gateway(drain_grace_s=PATIENCE_S)
    async with qlm.AsyncClient(gateway.address, reconnect_attempts_max=0) as client, grpc.aio.insecure_channel(gateway.address) as channel:
        stream = client.generate(MODEL, PROMPT, max_tokens=10)
        await stream.wait_accepted()
        await rig.agent.start_all()
        await rig.agent.step(3)
        gateway.start_drain()
        await until(lambda: gateway.gateway._hub.draining, "the drain")
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        calls = (client.submit(MODEL, PROMPT), anext(client.generate(MODEL, PROMPT)), anext(client.stream("r")), client.result("r", 1.0))
        for call in calls:
            with pytest.raises(Unavailable) as refused:
                await call
            assert refused.value.reason == "DRAINING"
            assert refused.value.retry_after_s == pytest.approx(0.1)
        rig.serve()
        assert await collect(stream) == expected_tokens(PROMPT, 10)
        assert stream.resumes == 0
        # Nobody is left: it does not wait for the rest of the grace.
        stopping = asyncio.create_task(gateway.stop())
        await until(stopping.done, "the end of the drain")


async def test_the_server_restarts_mid_stream(rig: Rig) -> None:
    gateway = await rig.gateway()
    rig.serve()
    async with qlm.AsyncClient(gateway.address) as client:
        stream = client.generate(MODEL, PROMPT, max_tokens=200)
        task = asyncio.create_task(collect(stream))
        await until(lambda: stream.offset > 20, "the stream under way")
        await rig.server.kill()
        with pytest.raises(Unavailable) as refused:
            async with qlm.AsyncClient(gateway.address, reconnect_attempts_max=0) as impatient:
                await impatient.submit(MODEL, PROMPT)
        assert refused.value.reason == "QUEUE_UNAVAILABLE"
        assert refused.value.retry_after_s is not None
        await rig.server.start()
        assert await task == expected_tokens(PROMPT, 200)


async def test_expiry_without_a_planner(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        with pytest.raises(RequestEnded) as ended:
            await collect(client.generate(MODEL, PROMPT, expire_after_s=0.2))
        assert ended.value.reason == "EXPIRED"


async def test_unknown_requests_and_offsets(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        for call in (client.result("nobody", 0.0), client.result("nobody", 1.0), client.cancel("nobody"), client.status("nobody")):
            with pytest.raises(NotFound):
                await call
        with pytest.raises(NotFound):
            await collect(client.stream("nobody"))
        await client.submit(MODEL, PROMPT, request_id="r")
        with pytest.raises(OffsetOutOfRange) as beyond:
            await collect(client.stream("r", offset=3))
        assert beyond.value.details == {"offset": "3", "produced": "0"}


async def test_status_and_models(rig: Rig) -> None:
    rig.publish()
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        await client.submit(MODEL, PROMPT, request_id="first", max_tokens=5)
        async with asyncio.timeout(PATIENCE_S):
            while True:  # until the gateway has read the waits
                status = await client.status("first")
                if status.request is not None and status.request.prediction is not None:
                    break
        assert status.live == 1
        assert status.unplaced == 1
        assert status.request is not None
        assert status.request.state is RequestState.ACCEPTED
        assert status.request.prediction is not None
        await client.submit(MODEL, PROMPT, request_id="second", max_tokens=5)
        await rig.agent.place()
        async with asyncio.timeout(PATIENCE_S):
            while (status := await client.status("second")).unplaced:  # until the reading of the queue is a new one
                pass
        assert status.request is not None
        assert status.request.state is RequestState.PLACED
        assert status.request.requests_ahead == 1
        assert status.request.instance == "a100-0"
        assert status.request.prediction is not None
        assert status.request.prediction.completion_p50_s > 0.0
        queue = next(queue for queue in status.virtual_queues if queue.instance == "a100-0")
        assert [group.waiting for group in queue.groups] == [1, 1]
        assert queue.alive
        models = await client.models()
        assert [(model.name, model.token_count, model.instances) for model in models] == [(MODEL, "approximate", 1)]
        rig.serve()
        assert await client.result("second", 10.0) is not None
        status = await client.status("second")
        assert status.request is not None
        assert status.request.state is RequestState.COMPLETED
        assert status.request.output_tokens == 5
