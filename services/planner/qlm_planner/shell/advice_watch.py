"""Computes advice in the background: a question is taken between two steps and answered in the solver's process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from qlm_planner.overload.advice import LATE_MIN, Advice, AdviceFailedError
from qlm_planner.overload.advice_question import Question

Work = Callable[[Question], Awaitable[Advice]]
"""`advise`, off the loop (`solver_client`). Raises AdviceFailedError."""


class AdviceWatch:
    """`question`: takes the question, in a thread that holds `turn`; None while the queue is unknown. `work`: answers it. `show`: receives
    the advice, or None. `latest`: None if there is nothing to advise."""

    def __init__(
        self,
        question: Callable[[], Question | None],
        work: Work,
        turn: asyncio.Lock,
        every_s: float,
        show: Callable[[Advice | None], None],
    ) -> None:
        self._question = question
        self._work = work
        self._turn = turn
        self._every_s = every_s
        self._show = show
        self._logged = ""
        self.latest: Advice | None = None

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            advice = None
            try:
                async with self._turn:
                    question = await asyncio.to_thread(self._question)
                if question is not None and question.needs_advice:
                    found = await self._work(question)
                    if found.late >= LATE_MIN or found.unserved or question.idle:
                        advice = found
            except AdviceFailedError as error:
                structlog.get_logger().warning("advice_failed", error=str(error))
            except Exception as error:  # invalid profiles or a bug cost the advice, not the plan
                structlog.get_logger().error("advice_failed", error=f"{type(error).__name__}: {error}", exc_info=True)
            self._publish(advice)

    def _publish(self, advice: Advice | None) -> None:
        self.latest = advice
        self._show(advice)
        line = "" if advice is None else advice.line
        if advice is not None and line != self._logged:
            structlog.get_logger().info(
                "planner_advice",
                advice=line,
                late=round(advice.late, 1),
                unserved=advice.unserved,
                attainment=round(advice.attainment, 4),
                misses=[f"{miss.group_id} {miss.model} {miss.late:.0f}/{miss.waiting} +{miss.over_s:.0f}s" for miss in advice.misses[:5]],
            )
        self._logged = line
