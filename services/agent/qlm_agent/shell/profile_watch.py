"""What was measured of the agent's GPUs (`qlm profile`) and told the queue (`qlm profiles import`): the estimator publishes it, and the
agent decides by it who gives way and how. Without it the rows that the agent started with hold, shipped or from facts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from qlm_agent.decisions.events import HardwareTold
from qlm_core.errors import Unavailable
from qlm_core.instance import InstanceFacts
from qlm_core.profile import HardwareProfile
from qlm_process.wire.profile import pair_rows_from_body
from qlm_queue.port import Queue

LOOK_EVERY_S = 5.0


async def watch_profiles(
    queue: Queue,
    facts: InstanceFacts,
    profiles: Mapping[str, str],
    hardware: Mapping[str, HardwareProfile],
    step: Callable[[HardwareTold], None],
) -> None:
    """Until it is cancelled. `profiles`: by model, the name of its row; `hardware`: the rows that the agent started with."""
    version, told = 0, hardware
    while True:
        try:
            found, body = await queue.read_profiles()
            if found != version:
                version = found
                rows = {row.model: row.scaled(facts.time_scale) for row in pair_rows_from_body(body, facts.gpu, facts.n_gpu)}
                now = {**hardware, **{model: rows[profile] for model, profile in profiles.items() if profile in rows}}
                if now != told:
                    told = now
                    structlog.get_logger().info("profiles_told", models=sorted(model for model in now if now[model] != hardware.get(model)))
                    step(HardwareTold(hardware=now))
        except Unavailable as error:
            structlog.get_logger().debug("profiles_not_read", error=str(error))
        except ValueError as error:
            structlog.get_logger().error("profiles_unreadable", version=version, error=str(error))
        await asyncio.sleep(LOOK_EVERY_S)
