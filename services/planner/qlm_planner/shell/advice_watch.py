"""Works advice out beside the planner's decisions: a picture is taken between two steps, and worked on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from qlm_planner.overload.advice import LATE_MIN, Advice, AdviceFailedError
from qlm_planner.overload.advice_question import Question

Work = Callable[[Question], Awaitable[Advice]]
"""`advise`, where it keeps nobody waiting (`solver_client`). Raises AdviceFailedError."""


class AdviceWatch:
    """`ask`: takes the picture, in a thread while nothing else has its `turn`; None while the queue is not known. `work`: answers it.
    `show`: is given it, or None. `changed`: set when there is other advice than before. `latest`: None while nothing is to be advised."""

    def __init__(
        self,
        ask: Callable[[], Question | None],
        work: Work,
        turn: asyncio.Lock,
        every_s: float,
        show: Callable[[Advice | None], None],
        changed: asyncio.Event,
    ) -> None:
        self._changed = changed
        self._ask = ask
        self._work = work
        self._turn = turn
        self._every_s = every_s
        self._show = show
        self._said = ""
        self.latest: Advice | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            advice = None
            try:
                async with self._turn:
                    question = await asyncio.to_thread(self._ask)
                if question is not None and question.worth_asking:
                    found = await self._work(question)
                    if found.late >= LATE_MIN or found.unserved or question.idle:
                        advice = found
            except AdviceFailedError as error:
                structlog.get_logger().warning("advice_failed", error=str(error))
            except Exception as error:  # nonsense in a profile, or a fault of ours, costs advice, not the plan
                structlog.get_logger().error("advice_failed", error=f"{type(error).__name__}: {error}", exc_info=True)
            self._tell(advice)

    def _tell(self, advice: Advice | None) -> None:
        if advice is not None or self.latest is not None:
            self._changed.set()
        self.latest = advice
        self._show(advice)
        said = "" if advice is None else advice.line
        if advice is not None and said != self._said:
            structlog.get_logger().info(
                "planner_advice",
                advice=said,
                late=round(advice.late, 1),
                unserved=advice.unserved,
                attainment=round(advice.attainment, 4),
                misses=[f"{miss.group_id} {miss.model} {miss.late:.0f}/{miss.waiting} +{miss.over_s:.0f}s" for miss in advice.misses[:5]],
            )
        self._said = said
