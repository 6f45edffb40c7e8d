"""Operations of a simulated engine that take time, and how each ended."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_agent.engines.port import EngineBusy, ModelLoadFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnded:
    """A load, offload or restore, by the number that it was given, ended at `ended_s` after `took_s`. `error`: a load that failed; tiers
    are as before. `run_ids`: whose KV an offload or restore moved."""

    number: int
    ended_s: float
    took_s: float
    run_ids: tuple[str, ...] = ()
    error: EngineBusy | ModelLoadFailed | None = None
