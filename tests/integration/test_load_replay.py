"""The replay on two real gateways: arrivals by the trace clock, streams that move, and what the ledger makes of faults."""

from __future__ import annotations

import asyncio
import time

from qlm.api.v1.request_pb2 import Request
from qlm_load.replay.ledger import Ledger, Report
from qlm_load.replay.replay import Replay, ReplaySettings
from qlm_load.workload.trace import Trace, TraceRow
from qlm_load.workload.workload import ModelShare, Workload, make_workload

from .gateway_rig import MODEL, Rig, until

TIME_SCALE = 4.0


def workload_of(count: int, gap_s: float = 0.1) -> Workload:
    rows = tuple(TraceRow(arrival_s=gap_s * n, input_tokens=6, output_tokens=20 + n % 3) for n in range(count))
    return make_workload(Trace(rows=rows), (ModelShare(name=MODEL, share=1.0, vocabulary_size=1_000),), seed=1, run_id="t")


class Replayed:
    """A replay that starts at two gateways. `seen`: requests as the agent pulled them, the time, and how many streams were open."""

    def __init__(self, rig: Rig, workload: Workload) -> None:
        self.rig = rig
        self.workload = workload
        self.seen: dict[str, tuple[Request, float, int]] = {}
        self.wrong = ""
        rig.agent.answer_of = self._answer

    async def run(self, *, kill: int = 0, **settings: int | float) -> Report:
        """`kill`: so many of the two gateways, once all requests are accepted."""
        gateways = [await self.rig.gateway(), await self.rig.gateway()]
        self.start_s = time.monotonic() + 0.05
        addresses = tuple(gateway.address for gateway in gateways)
        values = ReplaySettings(addresses=addresses, time_scale=TIME_SCALE, **settings)  # type: ignore[arg-type]
        ledger = Ledger(self.workload, TIME_SCALE, self.start_s)
        self.replay = Replay(self.workload, ledger, values)
        running = asyncio.create_task(self.replay.run(self.start_s))
        if kill:
            await until(lambda: all(entry.accepted_s is not None for entry in ledger.entries), "all are accepted")
            for gateway in gateways[:kill]:
                await gateway.kill()
        await running
        if not kill:
            await self.replay.read_again()
        assert (self.replay.progress().sent, self.replay.progress().in_flight) == (len(self.workload.requests), 0)
        return ledger.report(time.monotonic())

    def _answer(self, request: Request) -> list[int]:
        self.seen[request.request_id] = (request, time.monotonic(), self.replay.progress().in_flight)
        answer = list(self.workload.expected_output(self.workload.requests[int(request.request_id.removeprefix("t-"))]))
        return [answer[0] ^ 1, *answer[1:]] if request.request_id == self.wrong else answer


async def test_every_request_is_sent_once_when_it_is_due_and_every_token_is_checked(rig: Rig) -> None:
    replayed = Replayed(rig, workload_of(12))
    rig.serve()
    report = await replayed.run()
    assert report.clean, report.problems
    assert (report.sent, report.accepted, report.completed, report.verified) == (12, 12, 12, 12)
    assert (report.recovered, report.tokens) == (0, sum(request.output_tokens for request in replayed.workload.requests))
    for request in replayed.workload.requests:
        sent, at_s, _ = replayed.seen[request.request_id]
        assert list(sent.tokens.ids) == replayed.workload.prompt_ids(request)
        assert sent.sampling.max_tokens == request.output_tokens_max
        assert sent.slo.seconds == request.slo_s / TIME_SCALE
        assert at_s > replayed.start_s + request.arrival_s / TIME_SCALE - 0.1


async def test_more_than_the_bound_is_never_open(rig: Rig) -> None:
    replayed = Replayed(rig, workload_of(12, gap_s=0.0))
    rig.serve()
    assert (await replayed.run(in_flight_max=3)).completed == 12
    assert max(streams for _, _, streams in replayed.seen.values()) == 3


async def test_streams_go_on_at_the_other_gateway(rig: Rig) -> None:
    replayed = Replayed(rig, workload_of(10, gap_s=0.0))
    rig.serve(pause_s=0.02)
    report = await replayed.run(kill=1)
    assert (report.completed, report.wrong, report.doubled, report.lost) == (10, 0, 0, 0)
    assert 0 < report.recovered == report.streams_resumed <= 10


async def test_a_wrong_token_is_noticed(rig: Rig) -> None:
    replayed = Replayed(rig, workload_of(3, gap_s=0.0))
    replayed.wrong = "t-1"
    rig.serve()
    report = await replayed.run()
    assert (report.wrong, report.clean) == (1, False)


async def test_requests_that_never_end_are_lost(rig: Rig) -> None:
    report = await Replayed(rig, workload_of(3, gap_s=0.0)).run(kill=2, reconnect_attempts_max=0)
    assert (report.lost, report.completed, report.clean) == (3, 0, False)
