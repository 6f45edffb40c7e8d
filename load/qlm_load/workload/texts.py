"""Chats of people and of batch work for real models: arrivals, models, classes and texts by seed. The texts are in the package.

Batch work arrives at random and fills the seats of the engines for long; people send in waves. So a wave finds the batch full, and waits
too long unless requests are evicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

import numpy as np
import yaml

from qlm_core.vocabulary.errors import ConfigError
from qlm_load.workload.workload import REQUESTS_MAX, ModelShare, SloClass, Workload, WorkloadRequest, classes_of, pick

CHAT_CLASSES: tuple[SloClass, ...] = (
    SloClass(name="interactive", slo_s=6.0, share=0.6),
    SloClass(name="batch", slo_s=240.0, share=0.4),
)
"""Seconds to the last token; real time."""
ANSWER_TOKENS: Mapping[str, tuple[int, int]] = {"interactive": (16, 40), "batch": (200, 400)}
"""Least and most of `max_tokens` by class."""
WAVED = "interactive"
WAVE_S, WAVE_SHARE = 8.0, 0.1
"""Time from wave to wave, and the share of it in which a whole wave arrives."""


def chat_workload(count: int, rate_per_s: float, models: Sequence[ModelShare], seed: int, run_id: str) -> Workload:
    """`count` chats that arrive at a mean of `rate_per_s`, those of people in waves; their `input_tokens` are words, since only gateways
    count tokens. Raises ConfigError for impossible numbers and shares."""
    if not 1 <= count <= REQUESTS_MAX or not 0 < rate_per_s < float("inf"):
        raise ConfigError(f"1 to {REQUESTS_MAX:,} requests at a positive rate, not {count:,} at {rate_per_s}")
    texts = chat_texts()
    levels = np.random.Generator(np.random.PCG64([seed, 0x63686174])).random((count, 5)).tolist()
    gaps = [-float(np.log1p(-level[0])) / rate_per_s for level in levels]
    arrivals = np.concatenate([[0.0], np.cumsum(gaps[1:])]).tolist()
    drawn = []
    for arrival_s, (_, model_level, class_level, *rest) in zip(arrivals, levels, strict=True):
        model = pick(models, [each.share for each in models], model_level)
        slo = pick(*classes_of(model, CHAT_CLASSES), class_level)
        drawn.append((in_wave(arrival_s) if slo.name == WAVED else arrival_s, model, slo, rest))
    requests, chosen = [], []
    for index, (arrival_s, model, slo, (text_level, length_level)) in enumerate(sorted(drawn, key=lambda each: each[0])):
        least, most = ANSWER_TOKENS[slo.name]
        output_tokens = least + int(length_level * (most - least + 1))
        text = texts[slo.name][int(text_level * len(texts[slo.name]))]
        chosen.append(text)
        requests.append(
            WorkloadRequest(
                index=index,
                request_id=f"{run_id}-{index}",
                arrival_s=round(arrival_s, 6),
                model=model.name,
                slo_class=slo.name,
                slo_s=slo.slo_s,
                input_tokens=len(text.split()),
                output_tokens=output_tokens,
                output_tokens_max=output_tokens,  # real models end anywhere, within a reader's limit
            )
        )
    sizes = {model.name: model.vocabulary_size for model in models}
    notes = (f"{count:,} chats, seed {seed}, {rate_per_s:g} a second",)
    return Workload(seed=seed, requests=tuple(requests), vocabulary_sizes=sizes, notes=notes, texts=tuple(chosen))


def in_wave(arrival_s: float) -> float:
    """Moves an arrival close behind the beginning of its wave."""
    began_s = WAVE_S * (arrival_s // WAVE_S)
    return began_s + WAVE_SHARE * (arrival_s - began_s)


def chat_texts() -> Mapping[str, Sequence[str]]:
    found: dict[str, list[str]] = yaml.safe_load(files("qlm_load").joinpath("data/chats.yaml").read_text(encoding="utf-8"))
    return found
