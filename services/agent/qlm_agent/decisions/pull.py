"""When an agent pulls, for which model and how much (QLM section 5, request pulling).

It pulls for the active model while the batch has seats and KV has room for the predicted need, and learns from each answer the head of its
virtual queue. After a lost answer it reads its owned requests before it pulls again. Requests pulled beyond the batch (lookahead) wait in
the engine, so it reads the head before it takes more of them.

If other clients share the engine's server, room is the rest that they leave. An empty batch takes its first request at any size if they
leave some room, else it waits. For a head the agent evicts at most twice the capacity that the head needs; if others hold more, the head
waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlm_agent.decisions.batch_size import BatchSize
from qlm_agent.decisions.delivery import Delivery
from qlm_agent.decisions.effects import Effect, Pull, ReadOwned, StartRun
from qlm_agent.decisions.events import PullAnswered, PulledRun, QueueHead, WaitingGroup
from qlm_agent.decisions.expectations import Expectations
from qlm_agent.decisions.model_swap import ModelSwapControl
from qlm_agent.decisions.registration import ServerLink
from qlm_agent.decisions.runs import Ending, ReturnCause, Run, RunTable
from qlm_agent.decisions.settings import MachineSettings
from qlm_agent.engines.port import FinishReason
from qlm_core.operations.preemption import Urgency

PULL_MAX = 100
"""Most requests of one pull: a longer script would hold up the server for everybody."""

BEHIND_EVERY_S = 1.0
"""The groups behind the head are read so often at most: what they decide, the batch size and models to warm, takes longer to show."""


@dataclass(frozen=True, slots=True)
class _Call:
    """An unanswered pull; `signals`: how many there were at its start."""

    number: int
    model: str
    signals: int


class PullControl:
    """`head`: the first group of the virtual queue when it was last seen, None if it was empty; `behind`: those behind it, when they were
    last read."""

    def __init__(
        self, settings: MachineSettings, runs: RunTable, link: ServerLink, expectations: Expectations, batch_size: BatchSize
    ) -> None:
        self._settings = settings
        self._runs = runs
        self._link = link
        self._expectations = expectations
        self._batch_size = batch_size
        self._active = ""
        self.reset(0.0)

    def reset(self, now_s: float) -> None:
        """Forgets the queue, for a new incarnation."""
        self._call: _Call | None = None
        self._owned_call: int | None = None
        self._owned_due = False
        self._signals = 0
        self._more = True  # there may be something to pull
        self._head_stale = True  # the head may have changed
        self._suspect = False  # the first request of the head is to run alone
        self.blocked_tokens = 0  # KV that the first request of the head needs, 0 where it was not said
        self.head: QueueHead | None = None
        self.behind: tuple[WaitingGroup, ...] = ()
        self._behind_at_s = now_s  # when they are read again
        self._next_group = ""  # that stood behind the last pulled request
        self._poll_at_s = now_s + self._settings.poll_s
        self._check_at_s = now_s + self._settings.owned_check_s

    @property
    def under_way(self) -> bool:
        """The result of an unanswered call is unknown."""
        return self._call is not None or self._owned_due or self._owned_call is not None

    @property
    def head_is_fresh(self) -> bool:
        """No signal arrived since the head was read, and the server is usable."""
        return not self.under_way and not self._head_stale

    @property
    def head_is_new(self) -> bool:
        """The head is not the group that stood behind the last pulled request: the plan changed."""
        return self.head is not None and self.head.group_id != self._next_group

    @property
    def next_wakeup_s(self) -> float:
        return min(self._poll_at_s, self._check_at_s)

    def blocked(self, kv_capacity_tokens: int) -> bool:
        """The batch has no room for the head, which is of the active model, and eviction can make it."""
        if self._runs.running == 0 or self._suspect:
            return False
        # The agent's own limit is no reason to evict.
        seats, kv_tokens = self._runs.room(self._settings.batch_max, kv_capacity_tokens)
        return (seats < 1 or kv_tokens < max(1, self.blocked_tokens)) and not self._crowded(seats, kv_tokens)

    def _crowded(self, seats: int, kv_tokens: int) -> bool:
        """Others hold so much more than the runs leave (`seats`, `kv_tokens`) that most of the evicted capacity would be theirs."""
        if not self._runs.others_runs:
            return False
        lookahead = self._settings.lookahead_requests
        need = max(1, self.blocked_tokens, 0 if self.head is None else self._expectations.head_kv_tokens(self.head))
        return seats + lookahead < -1 or kv_tokens + lookahead * self._mean_kv_tokens < -need

    @property
    def _mean_kv_tokens(self) -> int:
        """Mean KV of a run."""
        return self._runs.kv_reserved // self._runs.running if self._runs.running else 0

    def note_signal(self) -> None:
        """The virtual queue changed."""
        self._signals += 1
        self._more = self._head_stale = True
        self.blocked_tokens = 0
        self._suspect = False

    def set_model(self, active_model: str) -> None:
        """The head may wait for the new model."""
        self._more = self._head_stale or (self.head is not None and self.head.model == active_model)
        self.blocked_tokens = 0

    def read_owned(self) -> None:
        """Owned requests must be read again."""
        self._owned_due = True

    def handle_pull(self, answer: PullAnswered) -> bool:
        """Whether this is the answer to the pull under way."""
        if self._call is None or self._call.number != answer.call:
            return False
        call, self._call = self._call, None
        self.head = answer.head
        if answer.behind is not None or answer.head is None:
            self.behind = answer.behind or ()
        if answer.pulled:
            self._next_group = "" if answer.head is None else answer.head.group_id
        self._head_stale = call.signals != self._signals
        # An empty engine takes the first request at any size, unless the server lists runs that are unknown here.
        refused = answer.blocked_tokens > 0 and not answer.pulled and self._runs.running == 0
        self._more = self._head_stale or (not refused and answer.head is not None and answer.head.model == self._active)
        self.blocked_tokens = answer.blocked_tokens if call.model else self.blocked_tokens
        self._suspect = answer.suspect if call.model else self._suspect
        return True

    def handle_owned(self, call: int) -> bool:
        """Whether this is the answer to the reading under way."""
        if self._owned_call != call:
            return False
        self._owned_call = None
        return True

    def handle_loss(self, call: int) -> None:
        """One of its calls, perhaps, was not answered."""
        if self._call is not None and self._call.number == call:
            if self._call.model:
                self._owned_due = True
            self._call = None
            self._more = self._head_stale = True
        elif self._owned_call == call:
            self._owned_call = None
            self._owned_due = True

    def decide(self, now_s: float, active_model: str, kv_capacity_tokens: int, *, may_pull: bool, may_take: bool = True) -> list[Effect]:
        """The call to make now, if any. `may_pull`: a call is allowed; `may_take`: so are new requests."""
        self._active = active_model or self._active
        if now_s >= self._poll_at_s:
            self._poll_at_s = now_s + self._settings.poll_s
            self._more = self._head_stale = True
            self.blocked_tokens = 0
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + self._settings.owned_check_s
            self._owned_due = True
        if not self._link.usable(now_s) or self._call is not None or self._owned_call is not None:
            return []
        if self._owned_due:
            self._owned_due = False
            self._owned_call = self._link.next_call()
            return [ReadOwned(call=self._owned_call)]
        if not may_pull:
            return []
        if may_take and self._more and active_model and (pull := self._pull_what_fits(now_s, active_model, kv_capacity_tokens)) is not None:
            return [pull]
        return [self._pull(now_s, "", 0, 0)] if self._head_stale else []

    def _pull_what_fits(self, now_s: float, model: str, kv_capacity_tokens: int) -> Pull | None:
        takes_suspect = self._runs.takes_suspect
        if self._runs.has_suspect or (self._suspect and not takes_suspect):
            return None
        seats, kv_tokens = self._room(kv_capacity_tokens)
        lookahead = self._settings.lookahead_requests
        if lookahead and not (self._head_stale and self.blocked(kv_capacity_tokens)):
            seats += lookahead
            kv_tokens += lookahead * self._mean_kv_tokens
        requests, kv_tokens = min(PULL_MAX, seats), max(0, kv_tokens)
        first = self._runs.running == 0 and (kv_tokens > 0 or not self._runs.others_kv_tokens)
        fits = first or kv_tokens >= max(1, self.blocked_tokens)
        return self._pull(now_s, model, requests, kv_tokens) if requests > 0 and fits else None

    def _room(self, kv_capacity_tokens: int) -> tuple[int, int]:
        """Seats and KV for more runs. First tokens do not wait for the seats that the SLOs of others keep free."""
        seats, kv_tokens = self._runs.room(self._batch_size.limit, kv_capacity_tokens)
        head = self.head
        if head is not None and head.first_token and head.model == self._active:
            seats = max(seats, min(head.waiting, self._runs.room(self._settings.batch_max, kv_capacity_tokens)[0]))
        return seats, kv_tokens

    def _pull(self, now_s: float, model: str, requests: int, kv_tokens: int) -> Pull:
        number, behind = self._link.next_call(), now_s >= self._behind_at_s
        if behind:
            self._behind_at_s = now_s + BEHIND_EVERY_S
        self._call = _Call(number, model, self._signals)
        return Pull(
            call=number,
            model=model,
            requests_max=requests,
            kv_tokens=kv_tokens,
            output_reserve_tokens=self._expectations.output_tokens(model),
            owned_aside=len(self._runs) - self._runs.running,
            suspects=self._runs.running > 0 and self._runs.takes_suspect,
            behind=behind,
        )


class Intake:
    """See the module."""

    def __init__(
        self, settings: MachineSettings, runs: RunTable, delivery: Delivery, expectations: Expectations, model_swap: ModelSwapControl
    ) -> None:
        self._settings = settings
        self._runs = runs
        self._delivery = delivery
        self._expectations = expectations
        self._model_swap = model_swap

    def own(self, pulled: PulledRun, *, serving: bool) -> list[Effect]:
        """Takes an unknown run. `serving`: the agent may start something."""
        if pulled.run_id in self._runs:
            return []
        run = self._run(pulled)
        self._runs.add(run)
        if pulled.refusal:
            self._delivery.queue_end(run, Ending(reason="ENGINE_FAILURE", message=pulled.refusal))
        elif run.stored >= run.output_tokens_max:
            # An earlier attempt produced all of it and ended before the report.
            self._delivery.queue_end(run, Ending(finish=FinishReason.LENGTH))
        elif not serving or run.model != self._model_swap.active or self._model_swap.swapping_to:
            self._delivery.give_back(run, ReturnCause.UNSTARTED)
        elif run.prompt_tokens + run.stored + 1 > self._model_swap.kv_capacity_tokens:
            message = f"{run.prompt_tokens + run.stored} tokens do not fit in {self._model_swap.kv_capacity_tokens} tokens of KV"
            self._delivery.queue_end(run, Ending(reason="KV_CAPACITY_EXCEEDED", message=message))
        else:
            return [StartRun(run_id=run.run_id, length_quantiles=self._expectations.length_quantiles(pulled))]
        return []

    def _run(self, pulled: PulledRun) -> Run:
        expected = self._expectations.output_tokens(pulled.model)
        band = self._settings.slo_band if pulled.priority is None else pulled.priority
        return Run(
            run_id=pulled.run_id,
            queue_id=pulled.queue_id,
            model=pulled.model,
            prompt_tokens=pulled.prompt_tokens,
            output_tokens_max=pulled.output_tokens_max,
            resumed=pulled.stored,
            produced=pulled.stored,
            stored=pulled.stored,
            kv_reserved=pulled.prompt_tokens + min(pulled.output_tokens_max, max(expected, pulled.stored + 1)),
            urgency=Urgency(band, pulled.deadline_s),
            first_token=pulled.first_token,
            slo_class=pulled.slo_class,
            resumable=pulled.resumable,
            displacements=pulled.displacements,
            failed=pulled.failed,
        )
