"""A replay against a cluster that runs already: `qlm load`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from rich.console import Console

import qlm
from qlm_core.vocabulary.errors import ConfigError
from qlm_load.replay.ledger import Ledger, Report
from qlm_load.replay.progress_bar import show_progress
from qlm_load.replay.replay import Replay, ReplaySettings
from qlm_load.workload.workload import ModelShare, Workload

LEAD_S = 0.5
"""Real seconds before the first arrival."""
CONNECT_ATTEMPTS_MAX = 5
"""Calls without an answer after which a cluster counts as absent."""


async def served_models(addresses: tuple[str, ...], wanted: Mapping[str, float]) -> tuple[ModelShare, ...]:
    """The models that the cluster serves, with the wanted shares (none: all, equally). Raises ConfigError for a model that it does not
    serve, and Unavailable. The vocabulary is unknown: it is taken to be that of `ModelShare`, as in the default configuration."""
    async with qlm.AsyncClient(addresses, reconnect_attempts_max=CONNECT_ATTEMPTS_MAX) as client:
        models = {model.name: model for model in await client.models()}
    unknown = wanted.keys() - models.keys()
    if unknown:
        raise ConfigError(f"not served: {', '.join(sorted(unknown))}; may be one of {', '.join(models)}")
    shares = wanted or dict.fromkeys(models, 1.0)
    return tuple(ModelShare(name=name, share=share, context_tokens_max=models[name].context_tokens_max) for name, share in shares.items())


async def run_replay(console: Console, workload: Workload, settings: ReplaySettings) -> Report:
    """Replays, shows progress, reads every result again, and returns the client's account."""
    start_s = time.monotonic() + LEAD_S
    ledger = Ledger(workload, settings.time_scale, start_s)
    replay = Replay(workload, ledger, settings)
    async with asyncio.TaskGroup() as group:
        showing = group.create_task(show_progress(console, replay, ledger, start_s), name="progress")
        await replay.run(start_s)
        showing.cancel()
    await replay.read_again()
    return ledger.report(time.monotonic())
