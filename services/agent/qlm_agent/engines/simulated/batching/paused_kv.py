"""KV of paused runs: on the GPU, in host memory, or on its way (FastServe, section 4.2). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import itemgetter

from qlm_agent.engines.policies.port import KvRule, Residence
from qlm_agent.engines.simulated.batching.batch_state import BatchState
from qlm_agent.engines.simulated.batching.sequences import RunState
from qlm_agent.engines.simulated.batching.transfers import Link

BURST_WINDOW_S = 1.0
BURST_WINDOWS = 30
"""Room for a burst: the most KV of new runs in one of the last windows. As long as their sum are bursts remembered."""


class Bursts:
    """Blocks that new runs needed, by window."""

    def __init__(self) -> None:
        self._windows: deque[tuple[int, int]] = deque(maxlen=BURST_WINDOWS)

    def add(self, now_s: float, blocks: int) -> None:
        window = int(now_s // BURST_WINDOW_S)
        if self._windows and self._windows[-1][0] == window:
            blocks += self._windows.pop()[1]
        self._windows.append((window, blocks))

    def most(self) -> int:
        return max(map(itemgetter(1), self._windows), default=0)


class PausedKv:
    """Makes room by a rule. `stall_s`: seconds that the next step waits for copies, `stalled_s`: that all did. `host_blocks`: in use.
    `step_s`: duration of the last step. The
    link to host memory carries both ways at once, each in order."""

    def __init__(self, state: BatchState, rule: KvRule, swap_s: Callable[[int], float], host_blocks_max: int) -> None:
        self.rule = rule
        self.stall_s = 0.0
        self.stalled_s = 0.0
        self.host_blocks = 0
        self.bursts = Bursts()
        self._state = state
        self._swap_s = swap_s
        self._host_blocks_max = host_blocks_max
        self._out, self._in = Link(), Link()
        self._moves: list[tuple[float, RunState, bool]] = []  # end, run, whether out
        self._leaving = 0  # blocks of the GPU
        self.step_s = 0.0

    @property
    def next_due_s(self) -> float | None:
        """When the next copy beside the steps ends, None for none."""
        return min((move[0] for move in self._moves), default=None)

    def take_stall_s(self) -> float:
        """The seconds that the step which begins waits."""
        stall_s, self.stall_s = self.stall_s, 0.0
        self.stalled_s += stall_s
        return stall_s

    def settle(self, now_s: float) -> None:
        """Ends the copies that are over."""
        if not self._moves:
            return
        for move in [move for move in self._moves if move[0] <= now_s]:
            self._moves.remove(move)
            _, run, out = move
            if out:
                self._leaving -= run.moving_blocks
                self._state.kv.give_back(run.moving_blocks)
            else:
                self.host_blocks -= run.moving_blocks
            if run.run_id not in self._state.paused:  # aborted on its way
                self._forget(run, Residence.HOST if out else Residence.GPU)
                continue
            run.residence = Residence.HOST if out else Residence.GPU
            self._state.changed = True

    def evict(self, blocks: int, candidates: Iterable[RunState]) -> None:
        """Frees room until so many blocks are free, or no candidate on the GPU is left; the first to lose its KV first."""
        state = self._state
        for run in candidates:
            if state.kv.free >= blocks:
                return
            if run.residence is not Residence.GPU:
                continue
            if self.rule is KvRule.RECOMPUTE or self.rule is KvRule.DEFER or not self._takes_host(run):
                state.drop_paused(run)
                continue
            self.stall_s += self._swap_s(run.kv_tokens)
            state.kv.give_back(run.moving_blocks)
            run.residence = Residence.HOST

    def fetch(self, run: RunState) -> None:
        """Copies KV back, and the next step waits for it; there is room."""
        self._state.kv.take(run.moving_blocks)
        self.host_blocks -= run.moving_blocks
        self.stall_s += self._swap_s(run.kv_tokens)
        run.residence = Residence.GPU

    def wants_moves(self, promised: int) -> bool:
        """Whether copies beside the steps are of use."""
        return self.host_blocks > 0 or self._state.kv.free + self._leaving < self._spare_blocks(promised)

    def move_ahead(self, now_s: float, by_need: list[RunState], promised: int) -> None:
        """Starts copies beside the steps. `by_need`: paused runs, the first to be seated first. Those that fit beside the running ones,
        the `promised` blocks and the room for a burst belong on the GPU."""
        state = self._state
        spare = self._spare_blocks(promised)
        until_s = now_s + self.step_s  # KV on its way is of no use, so no copy waits for longer than a step
        free = state.kv.free + self._leaving - spare
        on_gpu = free + sum(run.moving_blocks for run in by_need if run.residence is Residence.GPU)
        for run in by_need:
            on_gpu -= run.moving_blocks
            if on_gpu < 0 or not self._in.is_free(until_s):
                break
            if run.residence is Residence.HOST and state.kv.free - spare >= run.moving_blocks:
                state.kv.take(run.moving_blocks)
                self._start(now_s, run, out=False)
        wanted = sum(run.moving_blocks for run in by_need[: state.batch_max] if run.residence is Residence.HOST)
        lacking = wanted + spare - state.kv.free - self._leaving
        for run in reversed(by_need[state.batch_max :] if wanted else by_need):
            if lacking <= 0 or not self._out.is_free(until_s):
                return
            if run.residence is Residence.GPU and self._takes_host(run):
                self._leaving += run.moving_blocks
                lacking -= run.moving_blocks
                self._start(now_s, run, out=True)

    def _spare_blocks(self, promised: int) -> int:
        """To leave free for runs that were given seats, and for a burst."""
        return promised + (min(self.bursts.most(), self._state.kv.capacity // 2) if self._state.running else 0)

    def forget(self, run: RunState) -> None:
        """Frees the KV of a paused run that ends; a copy under way ends first."""
        if run.residence is not Residence.MOVING:
            self._forget(run, run.residence)

    def _forget(self, run: RunState, where: Residence) -> None:
        if where is Residence.HOST:
            self.host_blocks -= run.moving_blocks
        else:
            self._state.kv.give_back(run.moving_blocks)
        run.moving_blocks = 0

    def _takes_host(self, run: RunState) -> bool:
        if self.host_blocks + run.moving_blocks > self._host_blocks_max:
            return False
        self.host_blocks += run.moving_blocks
        return True

    def _start(self, now_s: float, run: RunState, *, out: bool) -> None:
        run.residence = Residence.MOVING
        self._moves.append(((self._out if out else self._in).carry(now_s, self._swap_s(run.kv_tokens)), run, out))
