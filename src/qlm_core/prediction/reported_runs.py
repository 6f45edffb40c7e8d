"""Agents' reports of running requests, for predictions of waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from qlm_core.prediction.prediction_views import RunningView


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRuns:
    """Requests of one group. `output_tokens`: what each has made; `prompt_tokens`: of all of them, of which those that have not started
    hold `prefill_left_tokens`; `offloaded_tokens`: KV of those in host memory."""

    output_tokens: tuple[int, ...]
    prompt_tokens: int
    prefill_left_tokens: int = 0
    offloaded_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRuns:
    """Running requests at a time of the queue's clock, by group id, where a request had a token every `token_s`."""

    at_s: float
    token_s: float
    groups: Mapping[str, GroupRuns] = field(default_factory=dict)

    def made_since(self, now_s: float) -> int:
        """Tokens that each may have made since then."""
        return int(max(0.0, now_s - self.at_s) / self.token_s)


def with_reported_outputs(view: RunningView, reported: Sequence[GroupRuns | None], made: int) -> RunningView:
    """With what each has made, if it made `made` tokens since the report; one that had made none on an engine with lookahead still waits.
    Where fewer run than were reported, some of all lengths have ended; those that were not reported have begun since."""
    groups = [runs for runs in reported if runs is not None]
    outputs = sorted(output + made if output or not view.lookahead else 0 for runs in groups for output in runs.output_tokens)
    if not outputs:
        return replace(view, produced_tokens=(0,) * view.count)
    share = view.count / len(outputs)
    kept = outputs if share >= 1.0 else [outputs[int((at + 0.5) / share)] for at in range(view.count)]
    return replace(
        view,
        produced_tokens=(*(0,) * (view.count - len(outputs)), *kept),
        prompt_tokens=round(share * sum(runs.prompt_tokens for runs in groups)),
        prefill_left_tokens=sum(runs.prefill_left_tokens for runs in groups),
        offloaded_tokens=sum(runs.offloaded_tokens for runs in groups),
    )
