"""An agent's vLLM engine with two models that take turns on the device: they sleep and wake at both levels, memory is looked at, and
answers stay the same. On a CPU the tiers are processes (no sleep), which shows that this check itself works. Prints one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from qlm_agent.engine import Tier
from qlm_agent.vllm.engine import VllmEngine
from qlm_core.errors import QlmError
from qlm_load.bench_agent.model_config import engine_models, made_up_prompt, vllm_settings, vocabulary_of, weights_gb_of
from qlm_load.bench_agent.port_runs import PortRuns

CONTEXT_TOKENS = 1024
KV_GB = 1.0
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 64, 32
MODELS = ("a", "b")
ROUNDS = 3


class CheckFailed(QlmError):
    """Something is not as it has to be."""

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


async def _checked(folder: Path, device: str, n_gpu: int, dtype: str) -> dict[str, object]:
    settings = vllm_settings(
        device=device,
        dtype=dtype,
        kv_cache_gb=KV_GB,
        enforce_eager=device == "cpu",
        prefix_caching=False,
        host_memory_gb=2.5 * weights_gb_of(folder),
    )
    engine = VllmEngine(engine_models(dict.fromkeys(MODELS, folder), CONTEXT_TOKENS), settings, batch_max=PROMPTS, n_gpu=n_gpu)
    prompts = [made_up_prompt(vocabulary_of(folder), number, PROMPT_TOKENS) for number in range(PROMPTS)]
    first: dict[str, list[bytes]] = {}
    events: list[dict[str, object]] = []

    async def activate(model: str, before: Tier) -> None:
        tier = engine.tier(model)
        if tier is not before:
            raise CheckFailed(f"model {model} is {tier}, and not {before}")
        free, began_s = _free_bytes(device), time.monotonic()
        await engine.load_model(model, Tier.ACTIVE)
        took_s = time.monotonic() - began_s
        answers = await _answers(engine, model, prompts)
        if answers != first.setdefault(model, answers):
            raise CheckFailed(f"model {model} answers otherwise after it was {before}")
        events.append({"model": model, "was": str(before), "took_s": took_s, "free_bytes_before": free, "free_bytes": _free_bytes(device)})

    try:
        await engine.start()
        for model in MODELS:
            await activate(model, Tier.COLD)
        for _ in range(ROUNDS):  # level 1: weights in host memory
            for model in MODELS:
                await activate(model, Tier.WARM)
        for model in MODELS:  # level 2: without weights
            await engine.load_model(model, Tier.COLD)
            await activate(model, Tier.COLD)
    finally:
        await engine.stop()
    return {"device": device, "n_gpu": n_gpu, "events": events, "answers": sum(map(len, first.values()))}


async def _answers(engine: VllmEngine, model: str, prompts: Sequence[list[int]]) -> list[bytes]:
    """One after the other: in a batch their rounding would depend on who else is in it."""
    runs = PortRuns(engine, model, f"check-{time.monotonic_ns()}")
    made = []
    async with runs.reading():
        for prompt in prompts:
            run = await runs.start(prompt, OUTPUT_TOKENS)
            await run.end()
            made.append(run.made)
    return made


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    import torch

    return int(torch.cuda.mem_get_info()[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
