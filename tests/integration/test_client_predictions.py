"""Predictions that a client has of its request: at acceptance, by its status, on its stream while it waits, and when it is refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

import qlm
from qlm.api.v1 import gateway_pb2, request_pb2
from qlm.api.v1.gateway_pb2_grpc import GatewayStub
from qlm.errors import InvalidRequest, QueueFull
from qlm.values import Outlook, Prediction, RequestState
from qlm.wire_errors import STATUS_TRAILER, RpcFailure
from qlm_cli.root import root
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.outlook.drain_rate import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S
from qlm_queue.values import Bounds, LiveRequest

from .gateway_rig import MODEL, PATIENCE_S, GatewayRun, Rig, open_rig

PROMPT = [5, 6, 7]
SLO_S = 20.0


async def gateway_with_waits(rig: Rig) -> GatewayRun:
    """A gateway that knows the instance from the published waits."""
    rig.publish()
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client, asyncio.timeout(PATIENCE_S):
        while not all(model.instances for model in await client.models()):
            await asyncio.sleep(0.02)
    return gateway


def check(prediction: Prediction | None) -> Prediction:
    assert prediction is not None
    assert 0.0 <= prediction.wait_p50_s <= prediction.wait_p90_s
    assert 0.0 < prediction.completion_p50_s <= prediction.completion_p90_s
    assert prediction.wait_p50_s <= prediction.completion_p50_s
    return prediction


async def test_acceptance_and_status_predict_when_it_starts_and_ends_and_how_likely_it_is_late(rig: Rig) -> None:
    gateway = await gateway_with_waits(rig)
    async with qlm.AsyncClient(gateway.address) as client:
        accepted = await client.submit(MODEL, PROMPT, slo_s=SLO_S, max_tokens=8, request_id="r")
        late = check(accepted.prediction).probability_late
        assert late is not None
        assert late < 0.01
        hopeless = await client.submit(MODEL, PROMPT, slo_s=0.01, max_tokens=2_000, request_id="hopeless")
        assert check(hopeless.prediction).probability_late == pytest.approx(1.0, abs=0.05)
        priority = await client.submit(MODEL, PROMPT, slo=qlm.Slo.priority_of(3), request_id="priority")
        assert check(priority.prediction).probability_late is None

        for placed in (False, True):
            if placed:
                await rig.agent.place()
            request = (await client.status("r")).request
            assert request is not None
            assert request.state is (RequestState.PLACED if placed else RequestState.ACCEPTED)
            assert (request.requests_ahead == 0) if placed else (request.requests_ahead is None)
            assert request.slo == qlm.Slo.completion(SLO_S)
            assert request.deadline_s == pytest.approx(accepted.accepted_s + SLO_S)
            assert check(request.prediction).probability_late is not None
        priority_now = (await client.status("priority")).request
        assert priority_now is not None
        assert (priority_now.slo, priority_now.deadline_s) == (qlm.Slo.priority_of(3), None)

        await rig.agent.pull()
        running = (await client.status("r")).request
        assert running is not None
        assert running.state is RequestState.RUNNING
        left = check(running.prediction)
        assert left.wait_p90_s == 0.0
        assert running.deadline_s is not None
        await rig.agent.step(7)
        nearly_done = (await client.status("r")).request
        assert nearly_done is not None
        assert nearly_done.output_tokens == 7
        assert check(nearly_done.prediction).completion_p50_s < left.completion_p50_s  # of 8 tokens at most
        repeated = await client.submit(MODEL, PROMPT, slo_s=SLO_S, max_tokens=8, request_id="r")
        assert (repeated.duplicate, repeated.prediction) == (True, None)


async def test_a_prediction_for_one_sent_again_is_by_its_place(rig: Rig) -> None:
    gateway = await gateway_with_waits(rig)
    async with qlm.AsyncClient(gateway.address) as client:
        for number in range(5):
            await client.submit(MODEL, PROMPT, slo_s=SLO_S, max_tokens=8, request_id=f"r{number}")
        again = await client.submit(MODEL, PROMPT, slo_s=SLO_S, max_tokens=8, request_id="r1")
        assert (again.duplicate, again.state) == (True, RequestState.ACCEPTED)
        check(again.prediction)
        await rig.agent.place()
        again = await client.submit(MODEL, PROMPT, slo_s=SLO_S, max_tokens=8, request_id="r1")
        assert (again.duplicate, again.state, check(again.prediction).requests_ahead) == (True, RequestState.PLACED, 1)
        stream = client.generate(MODEL, PROMPT, slo_s=SLO_S, max_tokens=8, request_id="r3")
        await stream.wait_accepted()
        assert check(stream.prediction).requests_ahead == 3
        assert check((await client.submit(MODEL, PROMPT, request_id="new")).prediction).requests_ahead == 5


async def test_a_prediction_for_one_that_waits_again_is_for_its_rest(rig: Rig) -> None:
    """Broken off after 280 of 300 tokens: its predicted end is later than while it ran, and earlier than a new request's."""
    gateway = await gateway_with_waits(rig)
    async with qlm.AsyncClient(gateway.address) as client:
        for name in ("r", "new"):
            await client.submit(MODEL, PROMPT, slo_s=SLO_S, max_tokens=300, request_id=name)
        await rig.agent.place()
        waiting = (await client.status("r")).request
        assert waiting is not None
        before = check(waiting.prediction)
        await rig.agent.pull()
        await rig.agent.step(280)
        await rig.agent.evict_all()
        again = (await client.status("r")).request
        assert again is not None
        assert (again.state, again.output_tokens, again.attempts) == (RequestState.PLACED, 280, 1)
        left = check(again.prediction)
        own_s = left.completion_p50_s - left.wait_p50_s
        assert 0.0 < own_s < 0.5 * (before.completion_p50_s - before.wait_p50_s)
        sent_again = await client.submit(MODEL, PROMPT, slo_s=SLO_S, max_tokens=300, request_id="r")
        assert (sent_again.duplicate, sent_again.state) == (True, RequestState.PLACED)
        found = check(sent_again.prediction)
        assert found.completion_p50_s - found.wait_p50_s == pytest.approx(own_s, rel=0.05)


async def test_the_command_shows_when_it_starts_and_ends(rig: Rig) -> None:
    gateway = await gateway_with_waits(rig)

    async def shown() -> dict[str, list[float]]:
        words = ["status", "r", "--address", gateway.address]
        done = await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, root, words)
        assert done.exit_code == 0, done.output
        times = re.findall(r"(starts|ends) in\s.*?([\d,.]+) s \(p50\), ([\d,.]+) s \(p90\)", done.output)
        return {name: [float(each.replace(",", "")) for each in quantiles] for name, *quantiles in times}

    async with qlm.AsyncClient(gateway.address) as client:
        await client.submit(MODEL, PROMPT, slo_s=SLO_S, max_tokens=1_000, request_id="r")
        for placed in (False, True):
            if placed:
                await rig.agent.place()
            waiting = await shown()
            assert 0.0 <= waiting["starts"][0] <= waiting["starts"][1]
            assert waiting["starts"][0] + 1.0 < waiting["ends"][0] < waiting["ends"][1], "a thousand tokens are not made at once"
        await rig.agent.pull()
        running = await shown()
        assert set(running) == {"ends"}
        assert 0.0 < running["ends"][0] < running["ends"][1]


async def test_a_hint_of_the_command_line_reaches_the_gateway_and_is_cut_to_the_limit(rig: Rig) -> None:
    gateway = await gateway_with_waits(rig)
    for number, hint in enumerate(("7", "4294967295")):
        words = ["submit", "-m", MODEL, "--no-wait", "--request-id", f"r{number}", "--max-tokens", "20", "--expected-output", hint, "hello"]
        sent = await asyncio.to_thread(CliRunner().invoke, root, [*words, "--address", gateway.address])
        assert sent.exit_code == 0, sent.output
    hints = []
    for number in range(2):
        found = await rig.queue.find(RequestKey("default", f"r{number}"))
        assert isinstance(found, LiveRequest)
        guess = request_pb2.Request.FromString(found.body).admission.length_guess
        hints.append(guess.hint_tokens)
        assert guess.expected_tokens <= 20
    assert hints == [7, 20]
    for absurd in ("-1", "4294967296", "many"):
        refused = await asyncio.to_thread(CliRunner().invoke, root, ["submit", "-m", MODEL, "--expected-output", absurd, "hello"])
        assert refused.exit_code == 2
        assert "--expected-output" in refused.output


async def test_pieces_of_text_are_counted_as_tokens(rig: Rig) -> None:
    """From an engine that reports only text: its stored output is no four bytes a token."""
    gateway = await gateway_with_waits(rig)
    rig.agent.text_output = True
    async with qlm.AsyncClient(gateway.address) as client:
        await client.submit(MODEL, PROMPT, slo_s=SLO_S, max_tokens=300, request_id="r")
        await rig.agent.start_all()
        for made in (0, 1, 40, 299):
            if made:
                await rig.agent.step(made - sum(each.sent for each in rig.agent.running.values()))
            running = (await client.status("r")).request
            assert running is not None
            assert running.output_tokens == made
            check(running.prediction)


async def test_a_stream_reports_its_outlook_while_it_waits_and_not_after(rig: Rig) -> None:
    gateway = await gateway_with_waits(rig)
    outlooks: list[Outlook] = []
    async with qlm.AsyncClient(gateway.address) as client, asyncio.timeout(PATIENCE_S):
        stream = client.generate(MODEL, PROMPT, slo_s=600.0, max_tokens=4, outlook_every_s=1.0, on_outlook=outlooks.append)
        assert stream.prediction is None
        await stream.wait_accepted()
        first = check(stream.prediction)
        reading = asyncio.create_task(_read(stream))
        while not outlooks:
            await asyncio.sleep(0.02)
        assert [outlook.state for outlook in outlooks] == [RequestState.ACCEPTED]
        assert stream.prediction is outlooks[-1].prediction is not first
        await rig.agent.place()
        while RequestState.PLACED not in {outlook.state for outlook in outlooks}:
            await asyncio.sleep(0.02)
        check(outlooks[-1].prediction)
        rig.serve()
        assert await reading == 4
        assert stream.prediction is None
        assert stream.result is not None


async def test_a_stream_reports_its_outlook_when_it_waits_again_and_then_the_rest(rig: Rig) -> None:
    gateway = await gateway_with_waits(rig)
    outlooks: list[Outlook] = []
    async with qlm.AsyncClient(gateway.address) as client, asyncio.timeout(PATIENCE_S):
        stream = client.generate(MODEL, PROMPT, slo_s=600.0, max_tokens=300, outlook_every_s=1.0, on_outlook=outlooks.append)
        await stream.wait_accepted()
        reading = asyncio.create_task(_read(stream))
        await rig.agent.start_all()
        await rig.agent.step(280)
        while stream.prediction is not None:
            await asyncio.sleep(0.02)
        outlooks.clear()
        await rig.agent.evict_all()
        while not outlooks:
            await asyncio.sleep(0.02)
        assert outlooks[0].state is RequestState.PLACED
        assert stream.prediction is outlooks[-1].prediction
        check(stream.prediction)
        rig.serve()
        assert await reading == 300
        assert stream.prediction is None


async def test_a_stream_of_an_accepted_request_reports_it_too_but_only_on_request(rig: Rig) -> None:
    gateway = await gateway_with_waits(rig)
    outlooks: list[Outlook] = []
    async with qlm.AsyncClient(gateway.address) as client, asyncio.timeout(PATIENCE_S):
        await client.submit(MODEL, PROMPT, max_tokens=4, request_id="r")
        attentive = client.stream("r", outlook_every_s=1.0, on_outlook=outlooks.append)
        silent_outlooks: list[Outlook] = []
        silent = client.stream("r", on_outlook=silent_outlooks.append)
        readers = [asyncio.create_task(_read(stream)) for stream in (attentive, silent)]
        while len(outlooks) < 2:
            await asyncio.sleep(0.02)
        rig.serve()
        assert await asyncio.gather(*readers) == [4, 4]
        assert silent_outlooks == []


async def _read(stream: qlm.TokenStream) -> int:
    return sum([chunk.count async for chunk in stream])


@pytest.mark.parametrize("every_s", [-1.0, 0.5, float("nan"), float("inf"), 3_601.0])
async def test_an_absurd_pace_is_refused(rig: Rig, every_s: float) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        for stream in (client.generate(MODEL, PROMPT, outlook_every_s=every_s), client.stream("r", outlook_every_s=every_s)):
            with pytest.raises(InvalidRequest) as raised:
                await anext(stream)
            assert raised.value.details["field"] == "outlook_every_s"


async def test_a_refused_request_learns_when_to_retry(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Bounds(queue_max=100, tenant_max=2, class_max=50)) as rig:
        gateway = await gateway_with_waits(rig)
        async with qlm.AsyncClient(gateway.address) as client:
            for number in range(2):
                await client.submit(MODEL, PROMPT, request_id=f"r{number}", tenant="a")
            hints = []
            for number in range(3):
                with pytest.raises(QueueFull) as raised:
                    await client.submit(MODEL, PROMPT, request_id=f"more{number}", tenant="a")
                assert raised.value.details["bound"] == "tenant"
                hints.append(raised.value.retry_after_s)
            assert all(hint is not None and RETRY_AFTER_MIN_S <= hint <= RETRY_AFTER_MAX_S for hint in hints)
            await client.submit(MODEL, PROMPT, request_id="other", tenant="b")
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            request = request_pb2.Request(model=MODEL, text="x", tenant="a")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await GatewayStub(channel).Submit(gateway_pb2.SubmitRequest(request=request), timeout=PATIENCE_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = cast(RpcFailure, refused.value).trailing_metadata() or ()
        (trailer,) = (value for key, value in trailers if key == STATUS_TRAILER)
        retry = RetryInfo()
        assert any(detail.Unpack(retry) for detail in Status.FromString(trailer).details)
        assert retry.retry_delay.ToNanoseconds() >= RETRY_AFTER_MIN_S * 1e9
