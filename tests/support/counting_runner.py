"""A scripted vLLM for the loop of an engine process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from qlm_agent.delivery.logprobs import record
from qlm_agent.engines.port import TextPrompt
from qlm_agent.engines.vllm.runner.port import RunnerStats, RunOutput, RunPlan, VllmProcessEnded
from qlm_core.vocabulary.chat import ChatPrompt


@dataclass
class CountingRunner:
    """Makes the tokens 100, 101, ... for each run, one a step. `hangs`: a step waits for it; `wakes`: a wake."""

    kv_limit_tokens: int = 60
    eos_ids: frozenset[int] = frozenset({2})
    left: dict[str, tuple[int, int]] = field(default_factory=dict)  # next token, tokens left
    away: set[str] = field(default_factory=set)
    on_the_way: set[str] = field(default_factory=set)  # to be away, where `leaves_late`; those make nothing from then on
    leaves_late: bool = False
    stopped: set[str] = field(default_factory=set)
    paused: bool = False
    hangs: threading.Event | None = None
    hung: bool = False
    wakes: threading.Event | None = None
    tops: dict[str, int] = field(default_factory=dict)  # likeliest tokens of the runs that want log probabilities
    gone: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.left) and not self.paused

    def check(self) -> None:
        if self.gone:
            raise VllmProcessEnded("it is gone")

    def text_prompt(self, prompt: TextPrompt) -> list[int]:
        return list(prompt.text.encode())

    def chat_prompt(self, prompt: ChatPrompt) -> list[int]:
        raise ValueError("no template")

    def text_of(self, before: Sequence[int]) -> Callable[[int], str | None]:
        return lambda token: chr(token)

    def add(self, plan: RunPlan, output_tokens: int) -> None:
        if plan.sampling.get("regex") == "(":
            raise ValueError("a regex that is none")
        self.left[plan.run_id] = (100 + len(plan.produced), output_tokens)
        if "logprobs" in plan.sampling:
            self.tops[plan.run_id] = plan.sampling["logprobs"]

    def abort(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            self.left.pop(run_id, None)

    def step(self) -> list[RunOutput]:
        if self.hangs is not None:
            self.hung = True
            self.hangs.wait()
        made = []
        for run_id, (token, left) in list(self.left.items()):
            if run_id in self.stopped:
                continue
            total = 10 + token - 100 + 1
            ends = left == 1 or total >= self.kv_limit_tokens
            said = record_of(token, self.tops[run_id]) if run_id in self.tops else b""
            made.append(RunOutput(run_id, [token], 1.0, 2.0, 2.0, finish="length" if ends else "", logprobs=said))
            self.left[run_id] = (token + 1, left - 1)
            if ends:
                del self.left[run_id]
        return made

    def pause(self, paused: bool) -> None:
        self.paused = paused

    def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        to = self.on_the_way if self.leaves_late else self.away
        to |= set(run_ids)
        self.stopped |= self.on_the_way
        return run_ids

    def offloaded(self) -> Collection[str]:
        return self.away

    def leaving(self) -> Collection[str]:
        return self.on_the_way

    def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        return []

    def reload(self, weights: str) -> None:
        raise RuntimeError("no such weights")

    def sleep(self, level: int) -> None:
        raise AssertionError

    def wake(self, level: int) -> None:
        assert self.wakes is not None
        self.hung = True
        self.wakes.wait()

    def trim(self) -> None:
        raise AssertionError

    def stats(self) -> RunnerStats:
        return RunnerStats(running=len(self.left), waiting=0, kv_used_tokens=0, kv_capacity_tokens=60, preemptions=0)

    def close(self) -> None:
        pass


def record_of(token: int, top: int) -> bytes:
    return record(-float(token), [(token + n, -float(token + n)) for n in range(top)])
