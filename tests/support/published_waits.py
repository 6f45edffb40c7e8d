"""Publishes the waits of a queue as a planner does that has just read it, for tests that place requests themselves."""

from __future__ import annotations

from collections.abc import Mapping

from qlm_core.prediction.planned_waits import PlannedWaits
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_planner.board.board import Board
from qlm_planner.board.demand import Demand
from qlm_planner.machine.effects import PublishWaits
from qlm_planner.plan.waits import WaitForecast
from qlm_planner.shell.queue_calls import snapshot_of
from qlm_process.wire import waits as waits_wire
from qlm_queue.port import Queue
from qlm_queue.values import Lease


async def planned_waits(queue: Queue, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> PlannedWaits:
    """The waits of the queue as it is now."""
    unplaced = await queue.read_unplaced("", 1)
    overview = await queue.overview()
    now_s = await queue.server_time_s()
    board = Board(slo_band=0)
    board.load(snapshot_of(overview), now_s)
    forecast = WaitForecast()
    forecast.load(catalogue, profiles)
    counted_to = unplaced[0].acceptance_number - 1 if unplaced else overview.accepted_count
    newest = {key: group.group_id for key, group in board.newest.items()}
    while (made := forecast.publish(board, Demand(now_s), lambda key, deadline_s: newest.get(key, ""), counted_to, 1.0, now_s)) is None:
        pass
    assert isinstance(made, PublishWaits), made
    return made.waits


async def publish_waits(queue: Queue, planner: Lease, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> PlannedWaits:
    """Publishes them under a planner's lease."""
    waits = await planned_waits(queue, catalogue, profiles)
    await queue.publish_waits(planner, waits_wire.to_body(waits))
    return waits
