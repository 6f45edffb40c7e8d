"""One run of a cell: its requests by seed, the cluster from a configuration file, and its results in virtual time."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import yaml
from scipy.special import gammaincinv, log1p

from qlm_core.vocabulary.overload import Overload
from qlm_core.vocabulary.request import RequestState
from qlm_load.matrix.cells import Cell, Traffic
from qlm_load.matrix.lengths import Tokens, token_counts
from qlm_load.workload import azure_shape
from qlm_load.workload.output_bounds import output_bound
from qlm_sim.comparison import RequestOutcome, simulate
from qlm_sim.from_config import describe, policy_of
from qlm_sim.requests import SimRequest

BURSTY_SHAPE = 1 / 2.5**2
"""Shape of the Gamma distribution of gaps between bursty arrivals: a coefficient of variation of 2.5."""
LIMIT_SPANS, LIMIT_MIN_S = 6.0, 1_800.0
"""A run ends after so many spans of its arrivals and at least so long; later requests count as late."""

Settings = tuple[tuple[str, str], ...]
"""Names of settings and their values, as `--set` gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTask:
    """A run. `variant`: a policy, and with "@" settings of its own ("slo@agent.batch=max"). `settings`: of the whole cluster.
    `batch_max`: of every agent."""

    cell: Cell
    variant: str
    batch_max: int
    seed: int
    settings: Settings = ()

    def overrides(self) -> dict[str, object]:
        """Settings by name, the variant's last."""
        policy, _, own = self.variant.partition("@")
        pairs = [part.split("=", 1) for part in own.split(";") if part]
        given: dict[str, object] = {"planner.policy": policy, "agent.batch_max": self.batch_max, "agent.simulated.seed": self.seed}
        return {**given, **dict(self.settings), **dict(pairs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Percentages of requests whose SLO was met, from arrival: `interactive` of the most urgent class, `every` of all, `classes` by class.
    `makespan_s`: until the last end; `backlog`, `backlog_s`: requests open at the last arrival, and from then to the last end.
    `tokens_per_s`, `in_time_tokens_per_s`: output tokens, and those of requests in time, over the makespan. `real_s`: of one core."""

    interactive: float
    every: float
    classes: Mapping[str, float]
    makespan_s: float
    backlog: int
    backlog_s: float
    tokens_per_s: float
    in_time_tokens_per_s: float
    swaps: int
    gave_way: int
    ended: int
    real_s: float


def requests_of(cell: Cell, seed: int) -> tuple[list[SimRequest], list[Traffic]]:
    """The requests of a cell in the order of arrival, and the traffic of each: the same for all policies and settings."""
    chance = np.random.Generator(np.random.PCG64([zlib.crc32(cell.key.encode()), seed]))
    arrivals_s = _arrivals_s(cell, chance.random(cell.requests))
    shares = np.cumsum([each.share for each in cell.traffic])
    picked = np.minimum(np.searchsorted(shares, chance.random(cell.requests) * shares[-1], side="right"), len(shares) - 1)
    levels = chance.random((3, cell.requests))
    bound_levels = chance.random(cell.requests).tolist()
    counts: dict[int, tuple[Tokens, Tokens]] = {}
    for spec in cell.models:
        if spec.context_tokens_max not in counts:
            counts[spec.context_tokens_max] = token_counts(cell.lengths, levels, spec.context_tokens_max)
    context = {spec.name: spec.context_tokens_max for spec in cell.models}
    traffic = [cell.traffic[at] for at in picked.tolist()]
    found = []
    for number, (each, arrival_s, level) in enumerate(zip(traffic, arrivals_s.tolist(), bound_levels, strict=True)):
        prompts, outputs = counts[context[each.model]]
        output_tokens = int(outputs[number])
        found.append(
            SimRequest(
                request_id=f"r-{number}",
                arrival_s=arrival_s,
                model=each.model,
                prompt_tokens=int(prompts[number]),
                output_tokens=output_tokens,
                output_tokens_max=output_bound(output_tokens, level),
                slo=each.slo,
                content=number,
            )
        )
    return found, traffic


def _arrivals_s(cell: Cell, levels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Seconds of arrivals at the cell's mean rate, by uniform levels."""
    if cell.arrivals == "poisson":
        return np.cumsum(-log1p(-levels)) / cell.rate_per_s
    shape = BURSTY_SHAPE if cell.arrivals == "bursty" else azure_shape.GAP_GAMMA_SHAPE
    unit = np.cumsum(gammaincinv(shape, levels) / shape)
    if cell.arrivals == "traced":
        # The whole hour's rates are stretched over the run; beyond them, since the sum of the gaps is random, the mean rate continues.
        reached = np.concatenate([[0.0], np.cumsum(azure_shape.RATE_PROFILE)]) / sum(azure_shape.RATE_PROFILE)
        share = unit / len(levels)
        unit = len(levels) * np.where(share < 1.0, np.interp(share, reached, np.linspace(0.0, 1.0, len(reached))), share)
    return unit / cell.rate_per_s


def run(task: CellTask) -> Measures:
    """Seconds to minutes of a core. Raises ConfigError for wrong settings."""
    began_s = time.process_time()
    cell = task.cell
    requests, traffic = requests_of(cell, task.seed)
    overrides = task.overrides()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cell.yaml"
        path.write_text(yaml.safe_dump(_document(cell)), encoding="utf-8")
        cluster = describe(str(path), [name for name, _ in _instances(cell)], overrides)
        policy = policy_of(str(path), overrides)
    cluster = replace(cluster, predictions=policy.overload is Overload.REFUSE)  # they decide nothing else
    limit_s = max(LIMIT_SPANS * requests[-1].arrival_s, LIMIT_MIN_S)
    result = simulate(cluster, requests, policy, seed=task.seed, limit_s=limit_s)
    return _measured(
        cell, requests, traffic, result.outcomes, limit_s, sum(result.swaps.values()), result.displaced, time.process_time() - began_s
    )


def _instances(cell: Cell) -> list[tuple[str, str]]:
    return [(f"gpu-{number}", gpu) for number, gpu in enumerate(cell.gpus)]


def _document(cell: Cell) -> dict[str, object]:
    return {
        "models": [{"name": spec.name, "profile": spec.profile, "context_tokens_max": spec.context_tokens_max} for spec in cell.models],
        "agents": [
            {"name": name, "gpu": gpu, "engine": "simulated", "models": [spec.name for spec in cell.models]}
            for name, gpu in _instances(cell)
        ],
    }


def _measured(
    cell: Cell,
    requests: Sequence[SimRequest],
    traffic: Sequence[Traffic],
    outcomes: Sequence[RequestOutcome],
    limit_s: float,
    swaps: int,
    gave_way: int,
    real_s: float,
) -> Measures:
    last_s = requests[-1].arrival_s
    in_time = [_in_time(request, outcome) for request, outcome in zip(requests, outcomes, strict=True)]
    by_class: dict[str, list[bool]] = {}
    for each, met in zip(traffic, in_time, strict=True):
        by_class.setdefault(each.slo_class, []).append(met)
    classes = {name: _percent(met) for name, met in sorted(by_class.items())}
    makespan_s = min(limit_s, max(outcome.finished_s for outcome in outcomes))
    tokens = [outcome.output_tokens for outcome in outcomes]
    return Measures(
        interactive=classes[cell.urgent],
        every=_percent(in_time),
        classes=classes,
        makespan_s=round(makespan_s, 1),
        backlog=sum(outcome.finished_s > last_s for outcome in outcomes),
        backlog_s=round(makespan_s - last_s, 1),
        tokens_per_s=round(sum(tokens) / makespan_s, 1),
        in_time_tokens_per_s=round(sum(count for count, met in zip(tokens, in_time, strict=True) if met) / makespan_s, 1),
        swaps=swaps,
        gave_way=gave_way,
        ended=sum(outcome.state is not None for outcome in outcomes),
        real_s=round(real_s, 1),
    )


def _in_time(request: SimRequest, outcome: RequestOutcome) -> bool:
    if outcome.state is not RequestState.COMPLETED:
        return False
    reached_s = outcome.first_token_s if request.slo.kind == "first_token" else outcome.finished_s
    return reached_s <= request.slo.deadline_s(request.arrival_s)


def _percent(met: Sequence[bool]) -> float:
    return round(100.0 * sum(met) / len(met), 2)
