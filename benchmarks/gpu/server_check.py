"""An agent's openai engine over two of vLLM's own API servers that take turns on one GPU: each sleeps while the other serves, at level 1
and once at level 2, and answers stay the same. On a CPU, where vLLM does not sleep, both are awake all the time, which tests this check
itself. Prints one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.agent.model_config import vocabulary_of
from benchmarks.gpu.api_servers import ApiServer
from benchmarks.gpu.engine_check import (
    CONTEXT_TOKENS,
    KV_GB,
    MODELS,
    PROMPTS,
    CheckFailed,
    answers_of,
    check_prompts,
    free_bytes,
)
from qlm_agent.engines.openai.build import openai_engine
from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import Tier
from qlm_core.vocabulary.errors import QlmError
from qlm_core.vocabulary.model import ModelSpec

STEPS = (("a", Tier.ACTIVE), ("b", Tier.ACTIVE), ("a", Tier.ACTIVE), ("b", Tier.ACTIVE), ("b", Tier.COLD), ("b", Tier.ACTIVE))
"""The last two: without weights, and read again."""
CALL_TIMEOUT_S = 60.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="qlm-servers-") as scratch:
        servers = {name: ApiServer(_arguments(chosen.model, name, chosen.device), Path(scratch) / f"{name}.log") for name in MODELS}
        try:
            for server in servers.values():
                server.start()
                if chosen.device == "cuda":
                    server.post("/sleep?level=1")  # so that the next one finds the GPU free
            sys.stdout.write(json.dumps(asyncio.run(_checked(chosen.model, chosen.device, servers))) + "\n")
        except QlmError as error:
            sys.stderr.write(error.message + "\n")
            return 1
        finally:
            for server in servers.values():
                server.stop()
    return 0


def _arguments(folder: Path, name: str, device: str) -> list[str]:
    values = {
        "model": str(folder),
        "served-model-name": name,
        "dtype": "auto" if device == "cuda" else "float32",
        "max-model-len": str(CONTEXT_TOKENS),
        "kv-cache-memory-bytes": str(round(KV_GB * 1e9)),
        "block-size": "32",
        "max-num-seqs": str(PROMPTS),
    }
    flags = ["--enable-sleep-mode", "--gpu-memory-utilization=0.01"] if device == "cuda" else ["--enforce-eager"]
    return [*flags, *(part for key, value in values.items() for part in (f"--{key}", value))]


async def _checked(folder: Path, device: str, servers: dict[str, ApiServer]) -> dict[str, object]:
    places = {name: {"base_url": server.url} for name, server in servers.items()}
    settings = OpenAiSettings.model_validate({"models": places, "sleep": device == "cuda", "call_timeout_s": CALL_TIMEOUT_S})
    specs = {
        name: ModelSpec(name=name, profile=name, context_tokens_max=CONTEXT_TOKENS, vocabulary_size=vocabulary_of(folder))
        for name in MODELS
    }
    engine = openai_engine(settings, specs, dict.fromkeys(MODELS, 0), PROMPTS)
    first: dict[str, list[bytes]] = {}
    events: list[dict[str, object]] = []
    await engine.start()
    try:
        for step, (model, tier) in enumerate(STEPS):
            events.append(
                {"stage": "servers", **await _step(engine, folder, model, tier, device, first), "settled": tier is Tier.ACTIVE and step > 1}
            )
    finally:
        await engine.stop()
    return {"device": device, "events": events, "answers": sum(map(len, first.values()))}


async def _step(
    engine: OpenAiEngine, folder: Path, model: str, tier: Tier, device: str, first: dict[str, list[bytes]]
) -> dict[str, object]:
    """One move, with its time and memory. Raises CheckFailed."""
    free, began_s = free_bytes(device), time.monotonic()
    await engine.load_model(model, tier)
    took_s = time.monotonic() - began_s
    if tier is Tier.ACTIVE:
        answers = await answers_of(engine, model, check_prompts(folder))
        if answers != first.setdefault(model, answers):
            raise CheckFailed(f"model {model} answers otherwise than before")
    return {"model": model, "to": str(tier), "took_s": took_s, "free_bytes_before": free, "free_bytes": free_bytes(device)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
