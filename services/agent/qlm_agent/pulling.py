"""When an agent pulls, for which model and how much (QLM section 5, request pulling).

It pulls for the active model while the batch has seats and KV has room for the need that is predicted, and knows from each answer what
waits at the head of its virtual queue. After a lost answer it reads what it owns before it pulls again.
"""

from __future__ import annotations

import math

from qlm_agent.effects import Effect, Pull, ReadOwned
from qlm_agent.machine_settings import MachineSettings
from qlm_agent.runs import RunTable
from qlm_agent.server_link import ServerLink
from qlm_core.profile import WORKLOAD_PRIOR

PULL_MAX = 100
"""Most requests of one pull: a longer script would hold up the server for everybody."""

OUTPUT_SAMPLES_MIN = 20
OUTPUT_SAMPLES_MAX = 200
"""Weight of the prior, and of all the past, in the expected output length."""


class Pulling:
    """`head_model`: of the first group of the virtual queue when it was last seen, "" if it was empty."""

    def __init__(self, settings: MachineSettings, runs: RunTable, link: ServerLink) -> None:
        self._settings = settings
        self._runs = runs
        self._link = link
        self._outputs: dict[str, tuple[int, float]] = {}  # model -> samples, mean
        self._active = ""
        self.reset(0.0)

    def reset(self, now_s: float) -> None:
        """A new incarnation knows nothing yet."""
        self._call: tuple[int, str, int] | None = None  # number, model, signals when it was made
        self._owned_call: int | None = None
        self._owned_due = False
        self._signals = 0
        self._more = True  # there may be something to pull
        self._look = True  # the head may have changed
        self._blocked_tokens = 0
        self.head_model = ""
        self._poll_at_s = now_s + self._settings.poll_s
        self._check_at_s = now_s + self._settings.owned_check_s

    @property
    def under_way(self) -> bool:
        """What an unanswered call will have taken is not known."""
        return self._call is not None or self._owned_due or self._owned_call is not None

    @property
    def next_wakeup_s(self) -> float:
        return min(self._poll_at_s, self._check_at_s)

    def expected_output_tokens(self, model: str) -> int:
        return math.ceil(self._outputs.get(model, (0, WORKLOAD_PRIOR.output_tokens_mean))[1])

    def finished(self, model: str, output_tokens: int) -> None:
        """A request completed: one more sample of its model's output length."""
        samples, mean = self._outputs.get(model, (OUTPUT_SAMPLES_MIN, WORKLOAD_PRIOR.output_tokens_mean))
        samples = min(samples + 1, OUTPUT_SAMPLES_MAX)
        self._outputs[model] = (samples, mean + (output_tokens - mean) / samples)

    def signalled(self) -> None:
        """Something happened to the virtual queue."""
        self._signals += 1
        self._more = self._look = True
        self._blocked_tokens = 0

    def model_changed(self) -> None:
        self._more = True
        self._blocked_tokens = 0

    def read_owned(self) -> None:
        """What is owned must be read again."""
        self._owned_due = True

    def pull_answered(self, call: int, head_model: str, blocked_tokens: int) -> bool:
        """Whether this is the answer to the pull under way."""
        if self._call is None or self._call[0] != call:
            return False
        _, model, signals = self._call
        self._call = None
        self.head_model = head_model
        self._look = signals != self._signals
        self._more = self._look or (head_model != "" and head_model == self._active)
        self._blocked_tokens = blocked_tokens if model else self._blocked_tokens
        return True

    def owned_answered(self, call: int) -> bool:
        """Whether this is the answer to the reading under way."""
        if self._owned_call != call:
            return False
        self._owned_call = None
        return True

    def lost(self, call: int) -> None:
        """One of its calls, perhaps, was not answered."""
        if self._call is not None and self._call[0] == call:
            if self._call[1]:
                self._owned_due = True
            self._call = None
            self._more = self._look = True
        elif self._owned_call == call:
            self._owned_call = None
            self._owned_due = True

    def decide(self, now_s: float, active_model: str, kv_capacity_tokens: int, *, may_pull: bool) -> list[Effect]:
        """The call to make now, if any. `may_pull`: nothing else forbids to take more."""
        self._active = active_model or self._active
        if now_s >= self._poll_at_s:
            self._poll_at_s = now_s + self._settings.poll_s
            self._more = self._look = True
            self._blocked_tokens = 0
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
        requests, kv_tokens = self._room(kv_capacity_tokens)
        fits = self._runs.running == 0 or kv_tokens >= max(1, self._blocked_tokens)
        if self._more and active_model and requests > 0 and fits:
            return [self._pull(active_model, requests, kv_tokens)]
        return [self._pull("", 0, 0)] if self._look else []

    def _room(self, kv_capacity_tokens: int) -> tuple[int, int]:
        """Seats and KV tokens: the batch and what running requests leave, and the lookahead on top."""
        lookahead = self._settings.lookahead_requests
        running = self._runs.running
        mean_need = self._runs.kv_reserved // running if running else 0
        requests = min(PULL_MAX, self._settings.batch_max + lookahead - running)
        return requests, max(0, kv_capacity_tokens - self._runs.kv_reserved + lookahead * mean_need)

    def _pull(self, model: str, requests: int, kv_tokens: int) -> Pull:
        call = self._link.next_call()
        self._call = (call, model, self._signals)
        reserve = self.expected_output_tokens(model)
        return Pull(call=call, model=model, requests_max=requests, kv_tokens=kv_tokens, output_reserve_tokens=reserve)
