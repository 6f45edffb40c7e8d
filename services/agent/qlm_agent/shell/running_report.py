"""The agent's report of its runs to the queue."""

from __future__ import annotations

from collections.abc import Mapping

from qlm_agent.decisions.runs import Run, RunPhase, RunTable
from qlm_agent.delivery.held_run import HeldRun
from qlm_core.prediction.reported_runs import GroupRuns, ReportedRuns
from qlm_process.wire.running import RUNS_MAX


def running_report(runs: RunTable, held: Mapping[str, HeldRun], *, now_s: float, token_s: float) -> ReportedRuns | None:
    """Tokens by group of the runs on the engine, at one token every `token_s`. None if there are too many to report."""
    if len(runs) > RUNS_MAX:
        return None
    groups: dict[str, list[Run]] = {}
    for run in runs.on_engine():
        if run.run_id in held:
            groups.setdefault(held[run.run_id].pulled.group_id, []).append(run)
    return ReportedRuns(
        at_s=now_s,
        token_s=token_s,
        groups={
            group_id: GroupRuns(
                output_tokens=tuple(run.produced for run in members),
                prompt_tokens=sum(run.prompt_tokens for run in members),
                prefill_left_tokens=sum(run.prompt_tokens for run in members if not run.started),
                offloaded_tokens=sum(run.context_tokens for run in members if run.phase is RunPhase.OFFLOADED),
            )
            for group_id, members in groups.items()
        },
    )
