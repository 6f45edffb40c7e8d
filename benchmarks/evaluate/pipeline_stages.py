"""Maps of a real Llama over two unlike devices, stage by stage, against the latency that `qlm_deploy` predicts.

A device is a number format on one thread of this CPU; a stage runs its layers with their KV there, and hidden states go through a pipe. The
topology has what a user would measure: a token through the whole model on each device, and the hop of one hidden state. The head is on the
last stage, while `qlm_deploy` spreads it over the layers: the model's known error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from multiprocessing import Pipe
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.evaluate.fastserve import Plan
from benchmarks.evaluate.rows import Row
from qlm_cli.models.found_model import read_model
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.model import ModelFacts
from qlm_deploy.deployers import DeviceMap
from qlm_deploy.plan import describe_map
from qlm_deploy.stages import Demand
from qlm_deploy.topology import parse_topology

DEVICES = ("float32", "float64")
PROMPT = tuple(range(100, 116))
TOKENS, WARM_TOKENS = 8, 2
SHARES = (0.2, 0.4, 0.6, 0.8)
"""Shares of the layers on the first device, by map."""

Layers = tuple[tuple[str, int], ...]
"""Device and number of layers of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMap:
    """Milliseconds of a token: processor time of the one thread, which other load on the machine does not change."""

    layers: Layers
    predicted_ms: float
    measured_ms: float


def pipeline(plan: Plan) -> Iterator[Row]:
    """One trial a seed. Needs PyTorch, Transformers and `--weights`. Raises ConfigError."""
    if plan.weights is None and "pipeline" not in plan.only:
        return
    if plan.weights is None or find_spec("torch") is None:
        raise ConfigError("the part pipeline needs PyTorch (.venv-vllm/bin/python) and --weights, a folder of `qlm models add smollm2`")
    model = StagedModel(plan.weights)
    trials = []
    for seed in plan.seeds:
        trials.append(measure_maps(plan.weights, model))
        plan.say(f"pipeline, trial {seed}: {trials[-1]}")
    for place, split in enumerate(trials[0]):
        name = "pipeline, " + " + ".join(f"{count} layers in {device}" for device, count in split.layers)
        measured, predicted = (tuple(getattr(trial[place], key) for trial in trials) for key in ("measured_ms", "predicted_ms"))
        ratios = tuple(mine / expected for mine, expected in zip(measured, predicted, strict=True))
        note = f"{np.mean(predicted):.1f} ms predicted, {np.mean(measured):.1f} measured"
        yield Row(name=f"{name}: measured over predicted, x", claim=(0.9, 1.1), ours=ratios, note=note)
    ordered = tuple(float(np.mean([ordered_right(one, other) for one, other in combinations(trial, 2)])) for trial in trials)
    yield Row(name="pipeline: pairs of maps in the predicted order, share", claim=(1.0, 1.0), ours=ordered)


def ordered_right(one: MeasuredMap, other: MeasuredMap) -> bool:
    return (one.predicted_ms < other.predicted_ms) == (one.measured_ms < other.measured_ms)


def measure_maps(folder: Path, model: StagedModel) -> list[MeasuredMap]:
    """Four maps of two stages."""
    found = read_model(folder)
    facts = ModelFacts(
        parameters_billion=found.parameters / 1e9,
        layers=found.layers,
        hidden_size=found.hidden_size,
        kv_heads=found.kv_heads,
        head_size=found.head_size,
    )
    splits = [round(share * facts.layers) for share in SHARES]
    maps: list[Layers] = [((DEVICES[0], first), (DEVICES[1], facts.layers - first)) for first in splits]
    whole: list[Layers] = [((device, facts.layers),) for device in DEVICES]
    decoded = model.decode([*whole, *maps], WARM_TOKENS + TOKENS)
    taken = {layers: median(steps_ms[WARM_TOKENS:]) for layers, (_, steps_ms) in decoded.items()}
    topology = parse_topology(
        {
            "devices": [{"name": layers[0][0], "memory_gib": 4.0, "token_ms": {found.name: taken[layers]}} for layers in whole],
            "links": [{"between": list(DEVICES), "bandwidth_gb_s": 1.0, "latency_us": model.hop_us(facts.hidden_size)}],
        }
    )
    demand = Demand(model=found.name, facts=facts)
    return [
        MeasuredMap(
            layers=layers,
            predicted_ms=describe_map("", topology, demand, DeviceMap(path=(0, 1), layers=tuple(count for _, count in layers))).latency_ms,
            measured_ms=taken[layers],
        )
        for layers in maps
    ]


class StagedModel:
    """The model once in each number format, on one thread."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._models: Mapping[str, Any] = {
            device: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, device)).eval() for device in DEVICES
        }
        self._into, self._out = Pipe()

    def decode(self, maps: Sequence[Layers], tokens: int) -> dict[Layers, tuple[list[int], list[float]]]:
        """One greedy sequence by each map: its tokens, and milliseconds of each. The maps take turns token by token, so that a change of
        the machine's speed meets all."""
        from transformers import DynamicCache

        caches = {layers: DynamicCache() for layers in maps}
        found: dict[Layers, tuple[list[int], list[float]]] = {layers: ([], []) for layers in maps}
        with self._torch.inference_mode():
            for place in range(tokens):
                for layers, (ids, steps_ms) in found.items():
                    began_s = time.process_time()
                    token = self._token(layers, caches[layers], ids[-1:] if place else list(PROMPT))
                    steps_ms.append(1e3 * (time.process_time() - began_s))
                    ids.append(token)
        return found

    def _token(self, layers: Layers, cache: Any, ids: Sequence[int]) -> int:
        torch = self._torch
        past = cache.get_seq_length()
        positions = torch.arange(past, past + len(ids))
        hidden = self._models[layers[0][0]].model.embed_tokens(torch.tensor([ids]))
        first = 0
        for place, (device, count) in enumerate(layers):
            model = self._models[device]
            if place:
                self._into.send_bytes(hidden.float().numpy().tobytes())
                received = np.frombuffer(self._out.recv_bytes(), np.float32).copy()
                hidden = torch.from_numpy(received).reshape(hidden.shape).to(model.dtype)
            rotary = model.model.rotary_emb(hidden, positions[None])
            for layer in model.model.layers[first : first + count]:
                hidden = layer(
                    hidden,
                    attention_mask=None,
                    position_ids=positions[None],
                    past_key_values=cache,
                    use_cache=True,
                    cache_position=positions,
                    position_embeddings=rotary,
                )
            first += count
        return int(model.lm_head(model.model.norm(hidden[:, -1])).argmax())

    def hop_us(self, hidden_size: int, pings: int = 200) -> float:
        """Median of a hidden state of one token through the pipe."""
        taken = []
        for _ in range(pings):
            began_s = time.process_time()
            self._into.send_bytes(bytes(4 * hidden_size))
            self._out.recv_bytes()
            taken.append(time.process_time() - began_s)
        return 1e6 * median(taken)
