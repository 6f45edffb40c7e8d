"""`advice_error`: the instances that the planner advises against the fewest with which the SLOs are met when the load is simulated.

A cluster runs a load in virtual time and gives advice after a minute; then the same load is run again with other numbers of
instances from that minute on, until the fewest are known that serve 99% in time of all that is due a minute later or after. The planner
advises from what it has measured by then, the truth is the whole simulated cluster with its noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.parts import Measured
from benchmarks.planner.advice_scenarios import ASK_S, HORIZON_S, MODELS, Scenario, scenarios
from benchmarks.planner.parts import Plan
from qlm_planner.overload.advice import SHARE, Advice, advise
from qlm_planner.overload.advice_question import SETTLE_S, question_of
from qlm_sim.cluster import Cluster
from qlm_sim.comparison import PlannedKill, simulate
from qlm_sim.description import ClusterDescription

CASES = 24
FLEET_MAX = 16
"""Most instances that are simulated."""

GONE_S = 86_400.0
"""An instance that goes does not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`advised`: the whole fleet by the advice; `fewest`: that is enough in simulation, FLEET_MAX + 1 where none is."""

    seed: int
    gpu: str
    models: int
    requests: int
    instances: int
    advised: int
    fewest: int

    @property
    def error(self) -> int:
        return self.advised - self.fewest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceError:
    """`within_one`: the share of cases with an error of at most one instance."""

    within_one: float
    exact: float
    cases: tuple[Case, ...]


def measure(plan: Plan) -> Measured:
    """All cases, several at a time."""
    found = summary(plan.each(case_of, scenarios(plan.some(CASES)), "advice_error"))
    return Measured(values={"advice_error": found.within_one}, details={"advice": asdict(found)})


def summary(cases: Sequence[Case]) -> AdviceError:
    return AdviceError(
        within_one=sum(abs(case.error) <= 1 for case in cases) / len(cases),
        exact=sum(case.error == 0 for case in cases) / len(cases),
        cases=tuple(cases),
    )


def case_of(scenario: Scenario) -> Case:
    """Requests advice, and finds the truth from there."""
    advised = fleet_advised(scenario)
    seen: dict[int, bool] = {}

    def enough(count: int) -> bool:
        if count not in seen:
            seen[count] = attainment(scenario, count) >= SHARE
        return seen[count]

    fewest = min(max(1, advised), FLEET_MAX)
    if enough(fewest):
        while fewest > 1 and enough(fewest - 1):
            fewest -= 1
    else:
        while fewest <= FLEET_MAX and not enough(fewest):
            fewest += 1
    return Case(
        seed=scenario.seed,
        gpu=scenario.gpu,
        models=len(scenario.models),
        requests=len(scenario.requests()),
        instances=scenario.instances,
        advised=advised,
        fewest=fewest,
    )


def fleet_advised(scenario: Scenario) -> int:
    """Instances of the scenario's GPU that the advice names after ASK_S."""
    found: list[Advice] = []

    def ask(cluster: Cluster) -> None:
        machine = next(planner.machine for planner in cluster.planners if planner.machine is not None)
        found.append(advise(question_of(machine.board, machine.changes.table, machine.demand, cluster.schedule.now_s)))

    simulate(_cluster(scenario, scenario.instances), scenario.requests(), probes=[(ASK_S, ask)], limit_s=ASK_S + 1.0, seed=scenario.seed)
    [advice] = found
    added = next((option.instances for option in advice.options if (option.gpu, option.n_gpu) == (scenario.gpu, 1)), 0)
    return scenario.instances + added - len(advice.spare)


def attainment(scenario: Scenario, count: int) -> float:
    """In time of all that is due SETTLE_S after the advice or later, with `count` instances from then on."""
    most = max(count, scenario.instances)
    # Added instances do not run before; removed ones do not run from then on.
    kills = [PlannedKill(process=scenario.instance(number).name, at_s=0.0, down_s=ASK_S) for number in range(scenario.instances, most)]
    going = [scenario.instance(number).name for number in range(count, scenario.instances)]
    kills += [PlannedKill(process=name, at_s=ASK_S, down_s=GONE_S) for name in going]
    # Requests that have not ended by the last deadline are late.
    limit_s = ASK_S + HORIZON_S + max(stream.slo.seconds for stream in scenario.streams)
    result = simulate(_cluster(scenario, most), scenario.requests(), kills=kills, limit_s=limit_s, seed=scenario.seed)
    due = [
        outcome.in_time
        for outcome, request in zip(result.outcomes, scenario.requests(), strict=True)
        if request.arrival_s + request.slo.seconds >= ASK_S + SETTLE_S
    ]
    return sum(due) / len(due)


def _cluster(scenario: Scenario, count: int) -> ClusterDescription:
    models = tuple(model for model in MODELS if model.name in scenario.models)
    return ClusterDescription(models=models, instances=tuple(scenario.instance(number) for number in range(count)))
