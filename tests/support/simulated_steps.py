"""A simulated batch whose steps a test controls."""

from __future__ import annotations

from collections.abc import Sequence

from qlm_agent.engines.policies.registry import FirstComeFirstServed
from qlm_agent.engines.simulated.batching.batch import SimulatedBatch
from qlm_agent.engines.simulated.batching.prefills import PrefillRule
from qlm_agent.engines.simulated.batching.sequences import Progress, RunState


class Steps:
    """Remembers the arguments of each step."""

    def __init__(self, duration_s: float = 1.0) -> None:
        self.calls: list[tuple[int, int, list[tuple[int, int]]]] = []
        self._duration_s = duration_s

    def __call__(self, sequences: int, context_tokens: int, prefills: Sequence[tuple[int, int]]) -> float:
        self.calls.append((sequences, context_tokens, list(prefills)))
        return self._duration_s


def make(
    steps: Steps | None = None,
    *,
    kv: int = 10_000,
    batch_max: int = 8,
    chunk: int = 1_000,
    policy: object = None,
    prefill: PrefillRule = PrefillRule.BESIDE,
) -> SimulatedBatch:
    return SimulatedBatch(
        step_s=steps or Steps(),
        kv_capacity_tokens=kv,
        batch_max=batch_max,
        prefill_chunk_tokens=chunk,
        policy=policy or FirstComeFirstServed(),  # type: ignore[arg-type]
        prefill=prefill,
    )


def run(name: str, prompt: int, target: int, *, resumed: int = 0, arrival: int = 0, priority: int = 0) -> RunState:
    return RunState(
        run_id=name,
        arrival=arrival or int(name),
        deadline_s=float("inf"),
        priority=priority,
        prompt_tokens=prompt,
        target_tokens=target,
        produced_tokens=resumed,
        resumed=resumed,
        reported=resumed,
    )


def spans_of(progress: Sequence[Progress]) -> list[str]:
    return [f"{each.run_id}[{each.start}:{each.end}]{'.' if each.done else ''}" for each in progress]
