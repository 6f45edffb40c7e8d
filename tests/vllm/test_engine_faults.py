"""Faults of real engine processes: each one is a clear error, and the engine continues where it can."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine_reader import EngineReader
from qlm_agent.engines.port import FailureKind, FinishReason, ModelLoadFailed, Tier
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.plans import VllmModel, environment
from qlm_agent.engines.vllm.process.template import Template
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_core.vocabulary.errors import ConfigError
from running_cluster import gone, wait_until
from vllm_nursery import QuickTemplate

DEADLINE_S = 90.0
STEP_TIMEOUT_S = 6.0


def pid_of(reader: EngineReader, model: str) -> int:
    """The process of a model."""
    assert isinstance(reader.engine, VllmEngine)
    child = reader.engine._placement.child(model)
    assert child is not None
    return child.pid


Make = Callable[..., EngineReader]


@pytest.fixture
async def make(tiny_models: tuple[Path, Path]) -> AsyncIterator[Make]:
    """Makes engines of two models, "a" and "b"; `weights` replaces the folder of one."""
    made: list[VllmEngine] = []

    def make(weights: dict[str, str] | None = None, **settings: Any) -> EngineReader:
        folders = {"a": str(tiny_models[0]), "b": str(tiny_models[1]), **(weights or {})}
        models = {name: VllmModel(name=name, weights=folder, context_tokens_max=2048) for name, folder in folders.items()}
        known = {"kv_cache_gb": 0.1, "step_timeout_s": STEP_TIMEOUT_S, **settings}
        engine = VllmEngine(models, VllmSettings(**known), batch_max=8, template=QuickTemplate())
        made.append(engine)
        return EngineReader(engine)

    yield make
    for engine in made:
        await engine.stop()


async def started(rig: EngineReader, *others: str) -> EngineReader:
    await rig.engine.start()
    await rig.engine.load_model("a", Tier.ACTIVE)
    for model in others:
        await rig.engine.load_model(model, Tier.WARM)
    return rig


async def test_a_process_that_dies_fails_its_runs_and_is_started_again(make: Make) -> None:
    rig = await started(make())
    await rig.add("one")
    await rig.add("two")
    await rig.until_made(1, "one", "two")
    pid = pid_of(rig, "a")
    os.kill(pid, signal.SIGKILL)
    for output in await rig.ends("one", "two"):
        assert output.failure is not None
        assert output.failure.kind is FailureKind.BROKEN
        assert "SIGKILL" in output.failure.message
    assert rig.engine.tier("a") is Tier.ACTIVE
    await rig.add("again", tokens=20)  # waits for the new process
    (again,) = await rig.ends("again")
    assert (again.finish, len(rig.tokens["again"])) == (FinishReason.LENGTH, 20)
    assert pid_of(rig, "a") != pid


async def test_a_step_that_hangs_ends_its_process(make: Make) -> None:
    rig = await started(make())
    await rig.add("stuck")
    await rig.until_made(1, "stuck")
    os.kill(pid_of(rig, "a"), signal.SIGSTOP)
    (stuck,) = await rig.ends("stuck")
    assert stuck.failure is not None
    assert stuck.failure.kind is FailureKind.BROKEN
    assert f"made no step for {STEP_TIMEOUT_S:g} s" in stuck.failure.message
    await rig.add("again", tokens=20)
    assert (await rig.ends("again"))[0].finish is FinishReason.LENGTH


async def test_an_idle_process_that_dies_is_started_again_unnoticed(make: Make) -> None:
    rig = await started(make())
    os.kill(pid_of(rig, "a"), signal.SIGKILL)
    await rig.add("r", tokens=20)  # perhaps before anybody knows
    (output,) = await rig.ends("r")
    assert output.finish is FinishReason.LENGTH or (output.failure is not None and output.failure.kind is FailureKind.BROKEN)
    await rig.add("again", tokens=20)
    assert (await rig.ends("again"))[0].finish is FinishReason.LENGTH


async def test_a_warm_process_that_hangs_is_replaced_when_it_is_wanted(make: Make) -> None:
    rig = await started(make(), "b")
    pid = pid_of(rig, "b")
    os.kill(pid, signal.SIGSTOP)
    await rig.engine.load_model("b", Tier.ACTIVE)
    assert pid_of(rig, "b") != pid
    wait_until(lambda: gone(pid), DEADLINE_S, "the hung process ends")


async def test_weights_that_are_not_there_are_named_and_nothing_changes(make: Make, tmp_path: Path) -> None:
    rig = await started(make({"b": str(tmp_path / "nowhere")}))
    for tier in (Tier.ACTIVE, Tier.WARM):
        with pytest.raises(ModelLoadFailed, match=r"nowhere has no config\.json"):
            await rig.engine.load_model("b", tier)
    assert (rig.engine.tier("a"), rig.engine.tier("b")) == (Tier.ACTIVE, Tier.COLD)
    await rig.add("r", tokens=20)
    assert (await rig.ends("r"))[0].finish is FinishReason.LENGTH


async def test_damaged_weights_are_a_failed_load(make: Make, tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_models[1], damaged)
    (damaged / "model.safetensors").write_bytes(b"\x10" + bytes(100))
    rig = await started(make({"b": str(damaged)}, host_memory_gb=1.0))
    with pytest.raises(ModelLoadFailed, match="model b could not be loaded"):
        await rig.engine.load_model("b", Tier.ACTIVE)
    assert rig.engine.tier("a") is Tier.ACTIVE
    await rig.add("r", tokens=20)
    assert (await rig.ends("r"))[0].finish is FinishReason.LENGTH


async def test_too_little_memory_is_a_failed_load(make: Make) -> None:
    rig = make(kv_cache_gb=1e6)
    await rig.engine.start()
    with pytest.raises(ModelLoadFailed, match="model a could not be loaded"):
        await rig.engine.load_model("a", Tier.ACTIVE)
    assert rig.engine.stats().active_model == ""


async def test_weights_that_cannot_be_reloaded_in_place_are_loaded_by_a_fresh_process(make: Make) -> None:
    rig = await started(make(host_memory_gb=0.001))  # holds none: one process at a time
    pid = pid_of(rig, "a")
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ModelLoadFailed, match="unknown"):
        await rig.engine.load_model("unknown", Tier.ACTIVE)
    os.kill(pid, signal.SIGCONT)
    await rig.engine.load_model("b", Tier.ACTIVE)
    assert pid_of(rig, "b") == pid, "the two have one shape"
    os.kill(pid, signal.SIGKILL)
    await rig.engine.load_model("a", Tier.ACTIVE)
    assert rig.engine.tier("b") is Tier.COLD
    await rig.add("r", tokens=20)
    assert (await rig.ends("r"))[0].finish is FinishReason.LENGTH


async def test_a_missing_vllm_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no such wheel')")
    path = os.pathsep.join([str(tmp_path), *(each for each in sys.path if each)])
    template = Template("", {**environment(VllmSettings()), "PYTHONPATH": path}, 300.0)
    with pytest.raises(ConfigError, match="no such wheel"):
        await template.start()
    with pytest.raises(ConfigError, match=r"agent\.vllm\.python: /nowhere/python"):
        await Template("/nowhere/python", {}, 300.0).start()


async def test_a_vllm_that_was_made_for_cpus_serves_no_gpu(make: Make) -> None:
    rig = make(device="cuda")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"agent\.vllm\.device: cuda, and this vLLM computes on cpu"):
            await rig.engine.start()


AGENT = """
import asyncio, sys
from pathlib import Path
from qlm_agent.engines.port import Tier
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.settings import VllmSettings

async def main():
    model = VllmModel(name="a", weights=sys.argv[1], context_tokens_max=2048)
    engine = VllmEngine({"a": model}, VllmSettings(kv_cache_gb=0.1), batch_max=8)
    await engine.start()
    await engine.load_model("a", Tier.ACTIVE)
    print(engine._placement.child("a").pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_engine_processes_end_with_their_agent(tiny_models: tuple[Path, Path]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(tiny_models[0])], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        pid = _first_number(agent)
    finally:
        agent.kill()
        agent.wait()
        if agent.stdout is not None:
            agent.stdout.close()
    wait_until(lambda: gone(pid), DEADLINE_S, "the engine process ends")


def _first_number(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.strip().isdigit():
            return int(line)
    raise AssertionError("the agent ended")
