"""Works advice out beside the planner's decisions: a picture is taken between two steps, and looked at elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from qlm_planner.advice.advising import Advice, Worked
from qlm_planner.advice.question import Question

PAUSE_SHARE = 10.0
"""The pause after advice is so many times as long as it had a core, at the least: it never takes more of it. How long it was waited for
does not count: where all is busy that is long, and advice must not be the rarer for it."""

FAILED_MAX_S = 6.0
"""What failed counts as long as it was waited for, up to this."""

Work = Callable[[Question], Awaitable[Worked]]
"""`advise`, where it keeps nobody waiting (`apart`)."""


class AdviceFigures(Protocol):
    """Where advice is shown as metrics."""

    def show_advice(self, advice: Advice | None) -> None: ...


class AdviceWatch:
    """`ask`: takes the picture, in a thread while nothing else has its `turn`; None while the queue is not known. `work`: answers it.
    `changed`: set when there is other advice than before. `latest`: None while nothing is to be advised."""

    def __init__(
        self,
        ask: Callable[[], Question | None],
        work: Work,
        turn: asyncio.Lock,
        every_s: float,
        figures: AdviceFigures,
        changed: asyncio.Event,
    ) -> None:
        self._changed = changed
        self._ask = ask
        self._work = work
        self._turn = turn
        self._every_s = every_s
        self._figures = figures
        self._said = ""
        self.latest: Advice | None = None

    async def run(self) -> None:
        """Until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._every_s)
            advice = None
            try:
                async with self._turn:
                    began_s = clock()
                    question = await asyncio.to_thread(self._ask)
                core_s = clock() - began_s
                if question is not None and question.worth_asking:
                    worked = await self._work(question)
                    advice = worked.advice
                    core_s += worked.core_s
            except Exception as error:  # nonsense in a profile, or a fault of ours, costs advice, not the plan
                structlog.get_logger().error("advice_failed", error=f"{type(error).__name__}: {error}", exc_info=True)
                core_s = min(FAILED_MAX_S, clock() - began_s)
            self._tell(advice)
            await asyncio.sleep(max(0.0, PAUSE_SHARE * core_s - self._every_s))

    def _tell(self, advice: Advice | None) -> None:
        if advice is not None or self.latest is not None:
            self._changed.set()
        self.latest = advice
        self._figures.show_advice(advice)
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
