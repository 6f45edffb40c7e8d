"""`qlm assess`: which groups are expected to have how many late requests, asked of a real estimator on a real queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result

from qlm_cli.root import root
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue

from .estimator_rig import A100, Estimator, Rig


@pytest.fixture
async def rig(server: EmbeddedServer) -> AsyncIterator[Rig]:
    rig = Rig(RedisQueue(server.url))
    await rig.start()
    yield rig
    await rig.queue.stop()


@pytest.fixture
async def estimator(server: EmbeddedServer, rig: Rig) -> AsyncIterator[Estimator]:
    estimator = Estimator(server.url)
    await estimator.start()
    yield estimator
    await estimator.stop()


async def assess(estimator: Estimator, *words: str) -> Result:
    arguments = ["assess", "--estimator", estimator.address, *words]
    return await asyncio.to_thread(CliRunner().invoke, root, arguments, env={"COLUMNS": "200"})


async def told(estimator: Estimator, *words: str) -> dict[str, object]:
    result = await assess(estimator, "--json", *words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.output.splitlines()[-1])  # the estimator logs to the same standard output here
    assert isinstance(document, dict)
    return document


async def test_the_most_late_groups_come_first_and_the_sums_are_over_all(rig: Rig, estimator: Estimator) -> None:
    fine = await rig.accept(3, deadline_in_s=100_000.0)
    late = await rig.accept(40, deadline_in_s=-1.0)
    found = await told(estimator)
    groups = found["groups"]
    assert isinstance(groups, list)
    assert [(group["group_id"], group["waiting"]) for group in groups] == [(late, 40), (fine, 3)]
    assert [group["late_expected"] for group in groups] == [pytest.approx(40.0), pytest.approx(0.0, abs=0.01)]
    assert {(group["instance"], group["slo_kind"], group["slo_class"]) for group in groups} == {(A100.name, "completion", "64s")}
    assert all(0.0 <= group["wait_p50_s"] <= group["wait_p90_s"] for group in groups)
    assert all(0.0 < group["completion_p50_s"] <= group["completion_p90_s"] for group in groups)
    first = await told(estimator, "--groups", "1", A100.name)
    assert [group["group_id"] for group in first["groups"]] == [late]  # type: ignore[attr-defined]
    for document in (found, first):
        assert (document["waiting"], document["groups_assessed"], document["unpredictable"]) == (43, 2, [])
        assert document["late_expected"] == pytest.approx(40.0, abs=0.01)
        assert document["tardiness_expected_s"] > 40.0  # type: ignore[operator]
    shown = (await assess(estimator)).output
    assert "43 wait in 2 groups: 40.0 expected to be late" in " ".join(shown.split())


async def test_an_instance_that_is_not_there_and_an_absurd_count_are_refused(estimator: Estimator) -> None:
    missing = await assess(estimator, "nobody")
    assert (missing.exit_code, "UNKNOWN_INSTANCE" in missing.output) == (1, True)
    assert (await assess(estimator, "--groups", "0")).exit_code == 2
    nothing = await told(estimator)
    assert (nothing["waiting"], nothing["groups"]) == (0, [])
