"""A client in virtual time: sends one request, reads its answer over any gateway, reconnects at its offset, and checks every token.

Its decisions are the SDK's own (`StreamPosition`, `Backoff`); the connection is a message queue each way, in order, as TCP is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from qlm.api.v1 import gateway_pb2
from qlm.api.v1.request_pb2 import RequestState as WireState
from qlm.errors import CallDeadlineExceeded, QlmError, Unavailable
from qlm.retry import Backoff, may_retry
from qlm.stream_position import ChunkFate, StreamPosition
from qlm_sim.processes.gateway import Message, ServerCall, SimGateway
from qlm_sim.requests import SimRequest, answer, message
from qlm_sim.world.chance import Chance
from qlm_sim.world.process import Process, Task, suspend
from qlm_sim.world.site import Site

ACCEPT_TIMEOUT_S = 10.0
"""As the SDK's `call_timeout_s`."""

ATTEMPTS_MAX = 10_000
"""A client of a simulation does not give up, to reveal an endless wait."""

CONNECT_REFUSED_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """`submits`: without a stream at first, which is opened after `reattach_after_s`. `leaves_after`: chunks after which it changes to
    another gateway, 0 for never. `think_s`: time that it takes for each chunk. `cancels_after_s`: None for never. `repeats`: sends the same
    request a second time, `conflicts`: another one under its id."""

    submits: bool = False
    reattach_after_s: float = 0.0
    leaves_after: int = 0
    think_s: float = 0.0
    cancels_after_s: float | None = None
    repeats: bool = False
    conflicts: bool = False


class Connection:
    """One call at one gateway, from the client's side."""

    def __init__(self, site: Site, client: Process, gateway: SimGateway, chance: Chance) -> None:
        self._site = site
        self._client = client
        self._gateway = gateway
        self._epoch = gateway.process.epoch
        self._chance = chance
        self._call = ServerCall(gateway.process, self._from_gateway)
        self._inbox: deque[tuple[gateway_pb2.StreamResponse | None, QlmError | None]] = deque()
        self._waiting: Task | None = None
        self._arrived_s = 0.0
        self._closed = False
        self._reads = 0

    def begin(self, call: Message) -> None:
        if not self._gateway.process.alive:
            self._arrive(CONNECT_REFUSED_S, None, Unavailable("connection refused"))
            return
        self._gateway.connect(self._call)
        self._gateway.process.deliver(self._delay_s(), lambda: None if self._closed else self._gateway.serve(call, self._call))

    async def read(self, timeout_s: float | None) -> gateway_pb2.StreamResponse | None:
        """The next response, None at the end. Raises QlmError, CallDeadlineExceeded."""
        if not self._inbox:
            self._reads += 1
            if timeout_s is not None:
                self._client.deliver(timeout_s, partial(self._time_out, self._reads))
            await suspend(self._wait)
        if not self._inbox:
            raise CallDeadlineExceeded("no answer in time")
        response, error = self._inbox.popleft()
        if error is not None:
            raise error
        if response is not None:
            self._gateway.process.deliver(self._delay_s(), self._call.taken)
        return response

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._gateway.process.epoch == self._epoch:
                self._gateway.process.deliver(self._delay_s(), lambda: self._gateway.drop(self._call))

    def _from_gateway(self, response: gateway_pb2.StreamResponse | None, error: QlmError | None) -> None:
        self._arrive(self._delay_s(), response, error)

    def _arrive(self, delay_s: float, response: gateway_pb2.StreamResponse | None, error: QlmError | None) -> None:
        now_s = self._site.schedule.now_s
        self._arrived_s = max(self._arrived_s, now_s + delay_s)
        self._client.deliver(self._arrived_s - now_s, lambda: self._take(response, error))

    def _take(self, response: gateway_pb2.StreamResponse | None, error: QlmError | None) -> None:
        if not self._closed:
            self._inbox.append((response, error))
            self._wake()

    def _wait(self, task: Task) -> None:
        self._waiting = task

    def _time_out(self, read: int) -> None:
        if read == self._reads and not self._inbox:
            self._wake()

    def _wake(self) -> None:
        task, self._waiting = self._waiting, None
        if task is not None:
            task.resume()

    def _delay_s(self) -> float:
        return 0.0002 + self._chance.wait_s(0.0003)


class SimClient:
    """`state`: that of the Result, "refused" if no gateway accepted it, "" while it waits. `taken`: tokens received."""

    def __init__(
        self, site: Site, process: Process, gateways: Sequence[SimGateway], request: SimRequest, behaviour: Behaviour, chance: Chance
    ) -> None:
        self.request = request
        self.behaviour = behaviour
        self.state = ""
        self.accepted = False
        self.cancelled: bool | None = None  # whether its cancel was answered; None where it sends none
        self.refused_others: list[str] = []
        self.others_open = 0
        self.resumes = 0
        self._site = site
        self._process = process
        self._gateways = gateways
        self._chance = chance
        self._at = chance.below(len(gateways))
        self._position = StreamPosition()
        self._expected = answer(request, site.catalogue[request.model])

    @property
    def taken(self) -> int:
        return self._position.next

    @property
    def done(self) -> bool:
        """Nothing of it waits for an answer."""
        return bool(self.state) and self.cancelled is not False and not self.others_open

    def start(self) -> None:
        self._process.spawn(self._run())
        if self.behaviour.cancels_after_s is not None:
            self.cancelled = False
            self._process.spawn(self._cancel(self.behaviour.cancels_after_s))
        if self.behaviour.repeats:
            self.others_open += 1
            self._process.spawn(self._send_other(self.request))
        if self.behaviour.conflicts:
            self.others_open += 1
            self._process.spawn(self._send_other(replace(self.request, content=self.request.content + 1)))

    # The request ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = self._backoff()
        chunks_left = self.behaviour.leaves_after or None
        while not self.state:
            try:
                chunks_left = await self._connection(backoff, chunks_left)
                error: QlmError = Unavailable("the stream ended without a result")
            except QlmError as failure:
                error = failure
            if self.state:
                return
            if not may_retry(error):
                assert not self.accepted, f"{self.request.request_id}, which is accepted, is refused with {error.reason}: {error.message}"
                self.state = "refused"
                return
            self.resumes += self.accepted
            self._at = (self._at + 1) % len(self._gateways)
            await self._process.sleep(backoff.next_pause_s(error))

    async def _connection(self, backoff: Backoff, chunks_left: int | None) -> int | None:
        """One call, until it ends or is broken off; returns after how many chunks the client breaks off, if it still will."""
        connection = Connection(self._site, self._process, self._gateways[self._at], self._chance)
        connection.begin(self._call())
        await_accepted = not self.accepted
        try:
            while True:
                response = await connection.read(ACCEPT_TIMEOUT_S if await_accepted else None)
                if response is None:
                    if self.behaviour.submits and self.accepted:
                        await self._process.sleep(self.behaviour.reattach_after_s)
                    return chunks_left
                await_accepted = False
                backoff.progress()
                if response.HasField("accepted"):
                    self.accepted = True
                if response.HasField("tokens"):
                    self._take(response.tokens)
                    if chunks_left is not None:
                        chunks_left -= 1
                        if chunks_left == 0:
                            return None
                    if self.behaviour.think_s:
                        await self._process.sleep(self.behaviour.think_s)
                if response.HasField("result"):
                    self._end(response.result.state)
                    return chunks_left
        finally:
            connection.close()

    def _call(self) -> Message:
        if self.accepted:
            return gateway_pb2.StreamRequest(tenant=self.request.tenant, request_id=self.request.request_id, offset=self._position.next)
        request = message(self.request, self._site.catalogue[self.request.model])
        return gateway_pb2.SubmitRequest(request=request) if self.behaviour.submits else gateway_pb2.GenerateRequest(request=request)

    def _take(self, chunk: gateway_pb2.TokenChunk) -> None:
        """Invariant 4, as a client sees it: every token is that of an undisturbed run."""
        count = len(chunk.token_ids)
        found = list(chunk.token_ids)
        wanted = self._expected[chunk.offset : chunk.offset + count].tolist()
        assert found == wanted, f"{self.request.request_id} is given other tokens than its answer's at {chunk.offset}"
        if self._position.on_chunk(chunk.offset, count) is ChunkFate.ASK:
            raise Unavailable(f"tokens from {chunk.offset} arrived where {self._position.next} was next")

    def _end(self, state: WireState.ValueType) -> None:
        name = WireState.Name(state).removeprefix("REQUEST_STATE_")
        self.accepted = True
        complete = self._position.next == len(self._expected)
        assert name != "COMPLETED" or complete, f"{self.request.request_id} COMPLETED with {self.taken} tokens of {len(self._expected)}"
        self.state = name

    # Beside it --------------------------------------------------------------------------------------------------------

    async def _cancel(self, after_s: float) -> None:
        await self._process.sleep(after_s)
        error = await self._until_answered(gateway_pb2.CancelRequest(tenant=self.request.tenant, request_id=self.request.request_id))
        assert error in ("", "UNKNOWN_REQUEST"), error
        self.cancelled = True

    async def _send_other(self, request: SimRequest) -> None:
        """The same id once more. The second call is a duplicate, or refused if it is another request."""
        await self._process.sleep(self._chance.wait_s(1.0))
        sent = message(request, self._site.catalogue[request.model])
        error = await self._until_answered(gateway_pb2.SubmitRequest(request=sent))
        if error:
            self.refused_others.append(error)
        self.others_open -= 1

    async def _until_answered(self, call: Message) -> str:
        """Sends a call to one gateway after the other until one answers; the reason of an answer that is an error."""
        backoff = self._backoff()
        while True:
            connection = Connection(self._site, self._process, self._chance.pick(self._gateways), self._chance)
            connection.begin(call)
            try:
                while await connection.read(ACCEPT_TIMEOUT_S) is not None:
                    pass
                return ""
            except QlmError as error:
                if not may_retry(error):
                    return error.reason
                pause_s = backoff.next_pause_s(error)
            finally:
                connection.close()
            await self._process.sleep(pause_s)

    def _backoff(self) -> Backoff:
        return Backoff(attempts_max=ATTEMPTS_MAX, max_s=2.0, addresses=len(self._gateways), random=self._chance.level)
