"""An agent's vLLM engine with two models that take turns on the device: they sleep and wake at both levels, memory is read, and answers
stay the same. On a CPU the tiers are processes (no sleep), which tests this check itself. Prints one JSON object.

Whether a model that leaves keeps its weights depends on the host memory, so each sleep level has an engine of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agent.model_config import engine_models, made_up_prompt, vllm_settings, vocabulary_of, weights_gb_of
from benchmarks.agent.port_runs import PortRuns
from qlm_agent.engines.port import Engine, Tier
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_core.vocabulary.errors import QlmError

CONTEXT_TOKENS = 1024
KV_GB = 1.0
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 64, 32
MODELS = ("a", "b")


class CheckFailed(QlmError):
    """A check found a wrong state."""

    default_reason = "ENGINE_FAILURE"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--n-gpu", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    chosen = parser.parse_args(arguments)
    try:
        sys.stdout.write(json.dumps(asyncio.run(_checked(chosen.model, chosen.device, chosen.n_gpu, chosen.dtype))) + "\n")
    except QlmError as error:
        sys.stderr.write(error.message + "\n")
        return 1
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """`held`: models whose weights host memory holds; `was`: tier of a model before it is active again."""

    name: str
    held: float
    rounds: int
    was: Tier


STAGES = (
    _Stage(name="weights in host memory", held=2.5, rounds=3, was=Tier.WARM),  # level 1
    _Stage(name="without weights", held=0.5, rounds=2, was=Tier.COLD),  # level 2
)


async def _checked(folder: Path, device: str, n_gpu: int, dtype: str) -> dict[str, object]:
    first: dict[str, list[bytes]] = {}
    events: list[dict[str, object]] = []
    for stage in STAGES:
        settings = vllm_settings(
            device=device,
            dtype=dtype,
            kv_cache_gb=KV_GB,
            enforce_eager=device == "cpu",
            prefix_caching=False,
            host_memory_gb=stage.held * weights_gb_of(folder),
        )
        engine = VllmEngine(engine_models(dict.fromkeys(MODELS, folder), CONTEXT_TOKENS), settings, batch_max=PROMPTS, n_gpu=n_gpu)
        try:
            await engine.start()
            for turn in range(1 + stage.rounds):
                for model in MODELS:
                    event = await _activated(engine, folder, model, stage.was if turn else Tier.COLD, device, first)
                    events.append({"stage": stage.name, "settled": turn > 0, **event})
        finally:
            await engine.stop()
    return {"device": device, "n_gpu": n_gpu, "events": events, "answers": sum(map(len, first.values()))}


async def _activated(
    engine: VllmEngine, folder: Path, model: str, before: Tier, device: str, first: dict[str, list[bytes]]
) -> dict[str, object]:
    """One model swap, with its time and memory. Raises CheckFailed."""
    tier = engine.tier(model)
    if tier is not before:
        raise CheckFailed(f"model {model} is {tier}, and not {before}")
    free, began_s = free_bytes(device), time.monotonic()
    await engine.load_model(model, Tier.ACTIVE)
    took_s = time.monotonic() - began_s
    answers = await answers_of(engine, model, check_prompts(folder))
    if answers != first.setdefault(model, answers):
        raise CheckFailed(f"model {model} answers otherwise after it was {before}")
    return {
        "model": model,
        "was": str(before),
        "took_s": took_s,
        "free_bytes_before": free,
        "free_bytes": free_bytes(device),
        "hostfree_bytes": os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def check_prompts(folder: Path) -> list[list[int]]:
    """The prompts of each model, the same every time."""
    return [made_up_prompt(vocabulary_of(folder), number, PROMPT_TOKENS) for number in range(PROMPTS)]


async def answers_of(engine: Engine, model: str, prompts: Sequence[list[int]]) -> list[bytes]:
    """One after the other: in a batch rounding depends on the other requests."""
    runs = PortRuns(engine, model, f"check-{time.monotonic_ns()}")
    made = []
    async with runs.reading():
        for prompt in prompts:
            run = await runs.start(prompt, OUTPUT_TOKENS)
            await run.end()
            made.append(run.output)
    return made


def free_bytes(device: str) -> int:
    """Free memory of the first GPU; 0 on a CPU."""
    if device == "cpu":
        return 0
    import torch

    return int(torch.cuda.mem_get_info()[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
