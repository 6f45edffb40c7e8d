"""Loads and fleets for the check of the planner's advice, by seed: models, GPU kinds, SLOs and rates vary."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from qlm_agent.config import AgentSettings
from qlm_core.prediction.prediction_service import service
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_sim.description import InstanceDescription
from qlm_sim.requests import SimRequest

ASK_S = 60.0
"""When advice is requested, after the start."""

HORIZON_S = 300.0
"""Requests arrive for so long after it."""

MODELS = (
    ModelSpec(name="mistral-7b", profile="Mistral-7B"),
    ModelSpec(name="vicuna-13b", profile="Vicuna-13B"),
)
GPUS = ("A100-80GB", "A10")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Requests of one model and SLO, with outputs around `output_tokens`."""

    model: str
    slo: Slo
    per_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`instances`: that serve from the start, all of one GPU."""

    seed: int
    gpu: str
    batch_max: int
    instances: int
    streams: tuple[Stream, ...]

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(stream.model for stream in self.streams))

    def instance(self, number: int) -> InstanceDescription:
        agent = AgentSettings(name=f"i{number:02d}", gpu=self.gpu, models=self.models, batch_max=self.batch_max)
        return InstanceDescription(agent=agent)

    def requests(self) -> list[SimRequest]:
        """Poisson arrivals until the horizon, outputs geometric above a tenth of their mean."""
        chance = random.Random(self.seed)
        found: list[tuple[float, Stream, int]] = []
        for stream in self.streams:
            at_s = chance.expovariate(stream.per_s)
            while at_s < ASK_S + HORIZON_S:
                least = stream.output_tokens // 2
                found.append((at_s, stream, least + min(3 * stream.output_tokens, int(chance.expovariate(1.0 / least)))))
                at_s += chance.expovariate(stream.per_s)
        found.sort(key=lambda each: each[0])
        return [
            SimRequest(
                request_id=f"r{number}",
                arrival_s=at_s,
                model=stream.model,
                prompt_tokens=stream.prompt_tokens,
                output_tokens=tokens,
                slo=stream.slo,
            )
            for number, (at_s, stream, tokens) in enumerate(found)
        ]


def scenarios(count: int) -> Sequence[Scenario]:
    """The first `count`, the same everywhere."""
    return [_scenario(seed) for seed in range(1, count + 1)]


def _scenario(seed: int) -> Scenario:
    chance = random.Random(f"advice {seed}")
    gpu = chance.choice(GPUS)
    models = MODELS[: chance.choice((1, 2))] if gpu == "A100-80GB" else MODELS[:1]
    batch_max = chance.choice((8, 16))
    load = chance.uniform(0.6, 3.2)  # of a full instance
    streams: list[Stream] = []
    parts = [chance.uniform(0.3, 1.0) for _ in range(2 * len(models))]
    for number, part in enumerate(parts):
        model = models[number // 2]
        output_tokens, prompt_tokens = chance.choice((200, 300, 500)), chance.choice((100, 400, 1000))
        instance = InstanceFacts(name="", incarnation="", gpu=gpu, n_gpu=1, engine="simulated", models=(model.name,))
        hardware = shipped_snapshot().hardware_for(instance, model)
        assert hardware is not None, (gpu, model)
        work_s = service(prompt_tokens, Normal(output_tokens, 0.0), hardware, batch_max).work.mean
        seconds = chance.choice((60.0, 90.0)) if number % 2 else chance.choice((120.0, 240.0))
        streams.append(
            Stream(
                model=model.name,
                slo=Slo(kind=SloKind.COMPLETION, seconds=seconds),
                per_s=load * part / sum(parts) / work_s,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
            )
        )
    return Scenario(seed=seed, gpu=gpu, batch_max=batch_max, instances=chance.choice((1, 1, 2, 3, 5)), streams=tuple(streams))
