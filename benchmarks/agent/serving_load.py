"""Measures a serving instance: a load through the gateway, and the estimator's findings about its runs.

An engine alone on its machine is quicker than one that shares it with the services that feed it and store its tokens. So the load passes
through all services, as any client's does, and enough of it waits that no seat of the instance is empty for want of work. A run is measured
from its first token to its end by the queue's events. The first runs of an engine are slow, and so is a new queue: by the end of the load
the estimator has forgotten them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from qlm import AsyncClient, RequestState
from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.errors import InvalidRequest, QlmError
from qlm_core.vocabulary.model import ModelSpec

PROMPT_TOKENS = (32, 64, 128, 256)
OUTPUT_TOKENS = (64, 256)
"""Each prompt is of one of these lengths, each answer of one between these."""
TOKEN_ID_LEAST = 100
"""Lower ids are control tokens of many vocabularies."""
PER_SEAT = 8
"""Requests that wait or run, for each seat."""
OUTSTANDING_MAX = 1_024
SLO_S = 86_400.0
"""So far ahead that the load is evicted for all other requests."""
EXPIRES_S = 120.0
"""Expiry of the load's requests after its end, if no client cancels them."""
WARM_UP_S = 15.0
WARM_UP_SHARE_MAX = 0.25
"""Warm-up before the measured part: seconds, and most of the whole load."""
RUNS_LEAST = 20
"""Least runs behind a learned row."""
LOOK_S = 1.5
SETTLES_S = 20.0
"""The estimator has read all ends when two readings, so far apart, agree; the most time for that."""

Learned = Callable[[], Awaitable[ProfileSnapshot]]


class NotMeasured(QlmError):
    """The load was not served, or no row was learned from it."""

    default_reason = "ENGINE_FAILURE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRow:
    """A learned row of a model on an instance. `before`: the row of the pair that its runs were compared with; `row`: that row, scaled by
    their slowness; `runs`: their number; `completed`: requests of the load."""

    model: str
    instance: str
    before: HardwareProfile
    row: HardwareProfile
    runs: int
    completed: int

    @property
    def factor(self) -> float:
        """Duration of the runs over that of the row before."""
        return self.row.decode_a_ms / self.before.decode_a_ms

    @property
    def evidence(self) -> str:
        """The row's evidence, in a line."""
        took = f"{self.runs} runs on {self.instance} took {self.factor:.3f} times as long as the row before says"
        return f"measured as it serves: {took}"


async def measure_serving(
    client: AsyncClient, learned: Learned, spec: ModelSpec, *, instance: str, seats: int, load_s: float, seed: int
) -> ServedRow:
    """Keeps `seats` seats full for `load_s`, and reads the row learned meanwhile for the model on the instance, without the beginning of
    the load; runs of others count as well. If the estimator remembers more earlier runs than the load had, all of them count. Unfinished
    requests are cancelled. Raises QlmError."""
    try:
        async with asyncio.TaskGroup() as group:
            warm = group.create_task(_after(min(WARM_UP_S, WARM_UP_SHARE_MAX * load_s), learned))
            load = group.create_task(_load(client, spec, seats, load_s, random.Random(seed)))
    except ExceptionGroup as failed:
        _raise_first(failed)
    completed = load.result()
    rows = await wait_until_settled(learned)
    row = learned_row(rows, instance, spec)
    if row is None or row.samples < RUNS_LEAST:
        runs = 0 if row is None else row.samples
        raise NotMeasured(
            f"{spec.name}: the estimator has learned from {runs} runs on {instance}, and at least {RUNS_LEAST} are needed; of this load "
            f"{completed} requests ended. Does the instance serve the model? A longer --limit gives more"
        )
    before = next(each for each in rows.hardware if not each.instance and each.key == row.key)
    earlier = learned_row(warm.result(), instance, spec)
    runs = row.samples - (earlier.samples if earlier is not None and earlier.samples <= row.samples else 0)
    return ServedRow(model=spec.name, instance=instance, before=before, row=row.as_measured(), runs=runs, completed=completed)


def learned_row(rows: ProfileSnapshot, instance: str, spec: ModelSpec) -> HardwareProfile | None:
    """The learned row of the model on the instance, None without one."""
    return next((row for row in rows.hardware if row.instance == instance and row.model == spec.profile), None)


async def _after(seconds: float, learned: Learned) -> ProfileSnapshot:
    await asyncio.sleep(seconds)
    return await learned()


async def wait_until_settled(learned: Learned) -> ProfileSnapshot:
    """The learned rows once the estimator has read all ends, or after SETTLES_S."""
    before = await learned()
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLES_S):
            while True:
                await asyncio.sleep(LOOK_S)
                now = await learned()
                if now.hardware == before.hardware:
                    return now
                before = now
    return before  # other clients' runs are learned from too


async def _load(client: AsyncClient, spec: ModelSpec, seats: int, load_s: float, dice: random.Random) -> int:
    """Returns the number of requests completed in time."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + load_s
    longest = PROMPT_TOKENS[-1] + OUTPUT_TOKENS[-1]
    if spec.context_tokens_max < longest:
        raise InvalidRequest(f"{spec.name}: the load needs a context of {longest} tokens, got {spec.context_tokens_max}")
    open_ids: set[str] = set()
    completed = 0

    async def client_of_one_request_at_a_time() -> None:
        nonlocal completed
        while (left_s := until_s - loop.time()) > 0.0:
            least = min(TOKEN_ID_LEAST, spec.vocabulary_size - 1)
            prompt = [dice.randrange(least, spec.vocabulary_size) for _ in range(dice.choice(PROMPT_TOKENS))]
            accepted = await client.submit(
                spec.name,
                prompt,
                slo_s=SLO_S,
                max_tokens=dice.randint(*OUTPUT_TOKENS),
                temperature=0.0,
                ignore_eos=True,
                expire_after_s=left_s + EXPIRES_S,
            )
            open_ids.add(accepted.request_id)
            result = await client.result(accepted.request_id, max(0.0, until_s - loop.time()))
            if result is None:
                return
            open_ids.discard(accepted.request_id)
            if result.state is not RequestState.COMPLETED:
                raise NotMeasured(f"{spec.name}: a request of the load ended {result.state}: {result.error_message}")
            completed += 1

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(OUTSTANDING_MAX, PER_SEAT * seats)):
                group.create_task(client_of_one_request_at_a_time())
    except ExceptionGroup as failed:
        _raise_first(failed)
    finally:
        for request_id in open_ids:
            with suppress(QlmError):
                await client.cancel(request_id)
    return completed


def _raise_first(failed: ExceptionGroup[Exception]) -> NoReturn:
    """The error for the user, if there is one."""
    ours, _ = failed.split(QlmError)
    if ours is None:
        raise failed
    first: BaseException = ours
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    raise first from None
