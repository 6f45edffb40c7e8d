"""Follows the measured rows of the agent's GPUs (`qlm profile`, `qlm profiles import`): the estimator publishes them, and the agent's
eviction decisions use them. Without them the rows at the agent's start hold, shipped or from facts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from qlm_agent.decisions.events import ProfilesUpdated
from qlm_core.profiles.profile import HardwareProfile
from qlm_core.vocabulary.errors import Unavailable
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_process.wire.profile import pair_rows_from_body
from qlm_queue.port import Queue

POLL_S = 5.0


async def watch_profiles(
    queue: Queue,
    facts: InstanceFacts,
    profiles: Mapping[str, str],
    hardware: Mapping[str, HardwareProfile],
    step: Callable[[ProfilesUpdated], None],
) -> None:
    """Watches until it is cancelled. `profiles`: by model, the name of its row; `hardware`: the rows at the agent's start."""
    version, known = 0, hardware
    while True:
        try:
            found, body = await queue.read_profiles()
            if found != version:
                version = found
                rows = {row.model: row.scaled(facts.time_scale) for row in pair_rows_from_body(body, facts.gpu, facts.n_gpu)}
                now = {**hardware, **{model: rows[profile] for model, profile in profiles.items() if profile in rows}}
                if now != known:
                    known = now
                    structlog.get_logger().info("profiles_read", models=sorted(model for model in now if now[model] != hardware.get(model)))
                    step(ProfilesUpdated(hardware=now))
        except Unavailable as error:
            structlog.get_logger().debug("profiles_not_read", error=str(error))
        except ValueError as error:
            structlog.get_logger().error("profiles_unreadable", version=version, error=str(error))
        await asyncio.sleep(POLL_S)
