"""The settings of an agent on engine vllm that serves folders of weights, as in its settings file, and a runner for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import structlog
import uvloop
from pydantic import ValidationError

from benchmarks.agent.parts import Plan
from benchmarks.gpu.host import gpu_of
from qlm_agent.config import AgentConfig
from qlm_agent.engines.vllm.folder import ModelFolder
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_core.vocabulary.errors import ConfigError
from qlm_load.interruptible import run_interruptible

Found = TypeVar("Found")

QUEUE, INSTANCE = "bench", "bench-0"
POLL_S = 1.0


def vllm_settings(**fields: Any) -> VllmSettings:
    """Raises ConfigError for an invalid setting."""
    try:
        return VllmSettings(**fields)
    except ValidationError as error:
        raise ConfigError("; ".join(f"agent.vllm.{each['loc'][0]}: {each['msg']}" for each in error.errors())) from error


def settings_of(plan: Plan, **fields: Any) -> VllmSettings:
    """Settings from the plan; `fields` win. Raises ConfigError for an invalid setting."""
    return vllm_settings(**{"dtype": plan.dtype, "device": plan.device, "enforce_eager": plan.device == "cpu", **fields})


def vocabulary_of(folder: Path) -> int:
    return int(ModelFolder.read(folder.name, str(folder)).config["vocab_size"])


def weights_gb_of(folder: Path) -> float:
    return ModelFolder.read(folder.name, str(folder)).weights_bytes / 1e9


def engine_models(folders: Mapping[str, Path], context_tokens: int) -> dict[str, VllmModel]:
    """For an engine without an agent."""
    return {name: VllmModel(name=name, weights=str(folder), context_tokens_max=context_tokens) for name, folder in folders.items()}


def agent_config(folders: Mapping[str, Path], context_tokens: int, seats: int, vllm: VllmSettings) -> AgentConfig:
    """One agent that serves these models, with figures from their shapes instead of a profile."""
    return AgentConfig.model_validate(
        {
            "queue": {"name": QUEUE},
            "models": [_model(name, folder, context_tokens) for name, folder in folders.items()],
            "agent": {
                "name": INSTANCE,
                "gpu": gpu_of(vllm.device),
                "engine": "vllm",
                "batch_max": seats,
                "poll_s": POLL_S,
                "vllm": vllm.model_dump(),
            },
        }
    )


def _model(name: str, folder: Path, context_tokens: int) -> dict[str, object]:
    read = ModelFolder.read(name, str(folder))
    found: dict[str, object] = {
        "name": name,
        "profile": f"bench-{name}",
        "weights": str(folder),
        "context_tokens_max": context_tokens,
        "vocabulary_size": int(read.config["vocab_size"]),
    }
    if read.facts is not None:
        found["facts"] = {name: value for name, value in asdict(read.facts).items() if value}
    return found


def made_up_prompt(vocabulary: int, number: int, tokens: int) -> list[int]:
    """Prompts of different numbers differ."""
    return [10 + (number * 7919 + place * 104_729 + number * place * 31) % (vocabulary - 10) for place in range(tokens)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, median and number of a list of figures."""
    return {"min": min(values), "median": median(values), "n": len(values)}


def run_quietly(main: Coroutine[Any, Any, Found]) -> Found:
    """Runs it on an agent's event loop; SIGTERM ends it as Ctrl-C does. Only warnings of its log are printed, on standard error."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING), logger_factory=structlog.PrintLoggerFactory(sys.stderr)
    )
    try:
        return run_interruptible(main, uvloop.new_event_loop)
    finally:
        structlog.configure(**before)
