"""The extension point for LSOs (QLM A.3, docs/adr/0018), and the sixth one: a limit of the batch."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

import qlm_agent
import qlm_planner
from qlm_agent.config import AgentSettings
from qlm_core.distribution import Normal
from qlm_core.model import ModelSpec
from qlm_core.operations.batch_limit import BATCH_MIN, SLO_SHARE, BatchLimit
from qlm_core.operations.operation import Means, Situation, effect_of, limits_of, shortest_slo_s
from qlm_core.operations.table import OPERATIONS, operations_of
from qlm_core.profile import HardwareProfile
from qlm_core.request import Slo, SloKind
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_planner.config import PlannerSettings
from qlm_planner.policy import Policy
from qlm_sim import ClusterDescription, InstanceDescription, SimRequest, simulate

MODEL = ModelSpec(name="mistral-7b", profile="Mistral-7B")


def hardware() -> HardwareProfile:
    found = shipped_snapshot().hardware_of_pair("A100-80GB", 1, MODEL)
    assert found is not None
    return found


def situation(slo_s: float, *, kind: SloKind = SloKind.COMPLETION, output_tokens: float = 300.0) -> Situation:
    return Situation(model=MODEL.name, slo_kind=kind, slo_s=slo_s, prompt_tokens=200.0, output=Normal(output_tokens, 0.0))


MEANS = Means(hardware=hardware(), batch_max=256)


def test_the_batch_is_as_large_as_the_slo_leaves_time_for() -> None:
    operation = BatchLimit()
    tight = situation(6.0)
    assert operation.applies(tight, MEANS)
    batch = operation.limits(tight, MEANS).batch_max
    assert BATCH_MIN <= batch < 256

    def service_s(sequences: int) -> float:
        context = sequences * (200.0 + 150.0)
        return MEANS.hardware.prefill_s(200.0) + 300.0 * MEANS.hardware.decode_step_s(sequences, context)

    assert service_s(batch) <= SLO_SHARE * 6.0 < service_s(batch + 1)
    assert operation.effect(tight, MEANS).batch_max == batch


@pytest.mark.parametrize(
    "other",
    [situation(600.0), situation(0.5), situation(math.inf), situation(6.0, kind=SloKind.FIRST_TOKEN)],
    ids=["time enough", "hopeless", "no deadline", "judged by its first token"],
)
def test_it_does_not_apply_where_it_would_not_help(other: Situation) -> None:
    assert not BatchLimit().applies(other, MEANS)
    assert effect_of([BatchLimit()], other, MEANS) == MEANS
    assert limits_of([BatchLimit()], [other], MEANS).batch_max == 256


def test_the_tightest_of_all_that_run_counts() -> None:
    both = [situation(600.0), situation(6.0), situation(7.0)]
    assert limits_of([BatchLimit()], both, MEANS).batch_max == BatchLimit().limits(situation(6.0), MEANS).batch_max


@pytest.mark.parametrize(
    ("slo_class", "seconds"), [("32s", 16.0), ("1/4s", 0.125), ("p3", math.inf), ("", math.inf), ("xs", math.inf), ("1/0s", math.inf)]
)
def test_the_shortest_slo_of_a_class(slo_class: str, seconds: float) -> None:
    assert shortest_slo_s(slo_class) == seconds


def test_operations_are_off_unless_named_and_wrong_names_are_refused() -> None:
    assert PlannerSettings().operations == AgentSettings().operations == ()
    assert PlannerSettings(operations=("batch_limit",)).operations == ("batch_limit",)
    for settings in (PlannerSettings, AgentSettings):
        with pytest.raises(ValueError, match="batch_limit"):
            settings(operations=("mig",))
    assert [each.name for each in operations_of(["batch_limit", "batch_limit"])] == ["batch_limit"]


def test_an_operation_is_known_to_nobody_but_the_table() -> None:
    """Planner and agent know the extension point alone: another operation changes neither."""
    folder = Path(__file__).resolve().parents[2]
    importers: list[str] = []
    for top in ("src", "services", "load"):
        for path in sorted((folder / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
                if any(name.startswith("qlm_core.operations.batch_limit") for name in names):
                    importers.append(path.relative_to(folder).as_posix())
    assert set(importers) == {"src/qlm_core/operations/table.py"}
    for package in (qlm_planner, qlm_agent):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            assert path.name == "config.py" or not any(name in path.read_text(encoding="utf-8") for name in OPERATIONS), path


def test_short_slos_are_met_beside_a_flood_where_the_batch_is_limited() -> None:
    """On the simulated engine, whose steps grow with the batch: a flood without hurry would fill it and slow down all that is in it."""
    hurry = [_request(f"t{number}", 1.0 + 0.5 * number, 200, 8.0) for number in range(60)]
    flood = [_request(f"f{number}", 12.0 + 0.005 * number, 300, 3600.0) for number in range(300)]
    late, ended_s = {}, {}
    for operations in ((), ("batch_limit",)):
        instance = InstanceDescription(agent=AgentSettings(name="a", models=(MODEL.name,), operations=operations))
        cluster = ClusterDescription(models=(MODEL,), instances=(instance,))
        result = simulate(cluster, sorted([*hurry, *flood], key=lambda each: each.arrival_s), Policy(operations=operations))
        late[operations] = sum(not each.in_time for each in result.outcomes if each.request_id.startswith("t"))
        ended_s[operations] = result.ended_s
    assert late["batch_limit",] < 0.5 * late[()]
    assert ended_s["batch_limit",] > ended_s[()], "that is its price"


def _request(name: str, at_s: float, output_tokens: int, slo_s: float) -> SimRequest:
    slo = Slo(kind=SloKind.COMPLETION, seconds=slo_s)
    return SimRequest(request_id=name, arrival_s=at_s, model=MODEL.name, prompt_tokens=300, output_tokens=output_tokens, slo=slo)
