"""Two models take turns on the device behind an agent's engine: they sleep and wake at both levels, memory is read, and answers stay the
same. `vllm`: the agent's own processes; `openai`: two of vLLM's API servers, of which one sleeps while the other serves. On a CPU, where
vLLM does not sleep, processes are the tiers and both servers are awake, which tests this check itself. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.agent.model_config import engine_models, made_up_prompt, vllm_settings, vocabulary_of, weights_gb_of
from benchmarks.gpu.api_servers import ApiServer
from qlm_agent.engines.openai.build import openai_engine
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import Engine, Tier, TokenPrompt
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.profiling.runs import ProfilingRuns
from qlm_core.vocabulary.errors import QlmError
from qlm_core.vocabulary.model import ModelSpec

CONTEXT_TOKENS = 1024
KV_GB = 1.0
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 64, 32
MODELS = ("a", "b")
CALL_TIMEOUT_S = 60.0
STAGES = (("weights in host memory", 2.5, 3, Tier.WARM), ("without weights", 0.5, 2, Tier.COLD))
"""Engine vllm at sleep levels 1 and 2: models whose weights host memory holds, rounds, and the tier of a model before it is active
again. Whether a model that leaves keeps its weights depends on the host memory, so each level has an engine of its own."""
SERVER_MOVES = (("a", Tier.ACTIVE), ("b", Tier.ACTIVE), ("a", Tier.ACTIVE), ("b", Tier.ACTIVE), ("b", Tier.COLD), ("b", Tier.ACTIVE))
"""Moves of engine openai. The last two: without weights, and read again."""


class CheckFailed(QlmError):
    """A check found a wrong state."""

    default_reason = "ENGINE_FAILURE"


@dataclass(slots=True, kw_only=True)
class Turns:
    """`answers`: each model's first ones; `events`: the moves so far."""

    folder: Path
    device: str
    answers: dict[str, list[bytes]] = field(default_factory=dict)
    events: list[dict[str, object]] = field(default_factory=list)

    async def move(self, engine: Engine, model: str, tier: Tier, *, stage: str, settled: bool, before: Tier | None = None) -> None:
        """One move, with its time and memory; `before`: the tier that the model must have. Raises CheckFailed."""
        was = engine.tier(model)
        if before not in (None, was):
            raise CheckFailed(f"model {model} is {was}, and not {before}")
        free, began_s = free_bytes(self.device), time.monotonic()
        await engine.load_model(model, tier)
        took_s = time.monotonic() - began_s
        if tier is Tier.ACTIVE:
            answers = await self._answers_of(engine, model)
            if answers != self.answers.setdefault(model, answers):
                raise CheckFailed(f"model {model} answers otherwise after it was {was}")
        self.events.append(
            {
                "stage": stage,
                "settled": settled,
                "model": model,
                "was": str(was),
                "to": str(tier),
                "took_s": took_s,
                "free_bytes_before": free,
                "free_bytes": free_bytes(self.device),
                "hostfree_bytes": os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            }
        )

    async def _answers_of(self, engine: Engine, model: str) -> list[bytes]:
        """One after the other: in a batch rounding depends on the other requests."""
        vocabulary = vocabulary_of(self.folder)
        runs = ProfilingRuns(engine, model, vocabulary, f"check-{time.monotonic_ns()}", CALL_TIMEOUT_S)
        made = []
        async with runs.reading():
            for number in range(PROMPTS):
                prompt = TokenPrompt(ids=made_up_prompt(vocabulary, number, PROMPT_TOKENS))
                run = await runs.add(prompt, PROMPT_TOKENS, OUTPUT_TOKENS)
                await runs.ends([run])
                made.append(run.made)
        return made


async def own_processes(turns: Turns, n_gpu: int, dtype: str) -> None:
    for stage, held, rounds, was in STAGES:
        settings = vllm_settings(
            device=turns.device,
            dtype=dtype,
            kv_cache_gb=KV_GB,
            enforce_eager=turns.device == "cpu",
            prefix_caching=False,
            host_memory_gb=held * weights_gb_of(turns.folder),
        )
        models = engine_models(dict.fromkeys(MODELS, turns.folder), CONTEXT_TOKENS)
        engine = VllmEngine(models, settings, batch_max=PROMPTS, n_gpu=n_gpu)
        try:
            await engine.start()
            for turn in range(1 + rounds):
                for model in MODELS:
                    before = was if turn else Tier.COLD
                    await turns.move(engine, model, Tier.ACTIVE, stage=stage, settled=turn > 0, before=before)
        finally:
            await engine.stop()


async def api_servers(turns: Turns) -> None:
    cuda = turns.device == "cuda"
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="qlm-servers-")))
        servers = {name: ApiServer(_arguments(turns, name), scratch / f"{name}.log") for name in MODELS}
        for server in servers.values():
            stack.callback(server.stop)
            server.start()
            if cuda:
                server.post("/sleep?level=1")  # so that the next one finds the GPU free
        places = {name: {"base_url": server.url} for name, server in servers.items()}
        settings = OpenAiSettings.model_validate({"models": places, "sleep": cuda, "call_timeout_s": CALL_TIMEOUT_S})
        vocabulary = vocabulary_of(turns.folder)
        specs = {name: ModelSpec(name=name, profile=name, context_tokens_max=CONTEXT_TOKENS, vocabulary_size=vocabulary) for name in MODELS}
        engine = openai_engine(settings, specs, dict.fromkeys(MODELS, 0), PROMPTS)
        stack.push_async_callback(engine.stop)
        await engine.start()
        for step, (model, tier) in enumerate(SERVER_MOVES):
            await turns.move(engine, model, tier, stage="servers", settled=tier is Tier.ACTIVE and step > 1)


def _arguments(turns: Turns, name: str) -> list[str]:
    cuda = turns.device == "cuda"
    values = {
        "model": str(turns.folder),
        "served-model-name": name,
        "dtype": "auto" if cuda else "float32",
        "max-model-len": str(CONTEXT_TOKENS),
        "kv-cache-memory-bytes": str(round(KV_GB * 1e9)),
        "block-size": "32",
        "max-num-seqs": str(PROMPTS),
    }
    flags = ["--enable-sleep-mode", "--gpu-memory-utilization=0.01"] if cuda else ["--enforce-eager"]
    return [*flags, *(part for key, value in values.items() for part in (f"--{key}", value))]


def free_bytes(device: str) -> int:
    """Free memory of the first GPU; 0 on a CPU."""
    if device == "cpu":
        return 0
    import torch

    return int(torch.cuda.mem_get_info()[0])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "openai"), default="vllm")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--n-gpu", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    chosen = parser.parse_args(arguments)
    turns = Turns(folder=chosen.model, device=chosen.device)
    try:
        asyncio.run(own_processes(turns, chosen.n_gpu, chosen.dtype) if chosen.engine == "vllm" else api_servers(turns))
    except QlmError as error:
        sys.stderr.write(error.message + "\n")
        return 1
    found = {"device": turns.device, "n_gpu": chosen.n_gpu, "events": turns.events, "answers": sum(map(len, turns.answers.values()))}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
