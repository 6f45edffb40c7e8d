"""`qlm profile` on a real engine behind the port: what it finds is what the engine does, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict

import pytest

from qlm_agent.config import AgentConfig
from qlm_agent.engines.choice import AgentEngine, engine_of
from qlm_agent.engines.port import Engine, EngineFailure, EngineOutput, EngineRequest, EngineStats, FailureKind, Tier, TokenPrompt
from qlm_agent.engines.simulated.engine import SimulatedEngine
from qlm_agent.engines.simulated.timing import InstanceNoise
from qlm_agent.profiling import session
from qlm_agent.profiling.design import FIRST
from qlm_agent.profiling.experiment import Profiler
from qlm_agent.profiling.fitting import fit
from qlm_agent.profiling.measurements import Measurements
from qlm_agent.profiling.rows import ProfiledModel
from qlm_agent.profiling.runs import ProfilingFailed
from qlm_agent.profiling.session import profile_engine, until_stopped
from qlm_cli.serve.document import facts_of
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import ConfigError
from running_text_server import RunningTextServer
from text_server import KEY, MODEL
from virtual_time import in_virtual_time

SHIPPED = shipped_snapshot()
SCALE = 20.0


def config_of(*, gpu: str = "A100-80GB", models: Sequence[str] = ("m",), **simulated: object) -> AgentConfig:
    known = [
        {"name": "m", "profile": "Mistral-7B"},
        {"name": "same", "profile": "Mistral-7B"},
        {"name": "v", "profile": "Vicuna-13B", "context_tokens_max": 2048},
    ]
    engine = {"time_scale": SCALE, "host_memory_gb": 64.0, **simulated}
    return AgentConfig.model_validate({"models": known, "agent": {"gpu": gpu, "models": list(models), "simulated": engine}})


def bias_of(config: AgentConfig) -> float:
    """Bias of the instance, which the profiler does not know."""
    simulated = config.agent.simulated
    return InstanceNoise(seed=simulated.seed, instance=config.agent.name, step_noise=simulated.step_noise, bias_max=simulated.bias_max).bias


def profiles_of(config: AgentConfig, *names: str, limit_s: float) -> list[ProfiledModel]:
    return in_virtual_time(lambda clock: profile_engine(config, SHIPPED, names, limit_s=limit_s, say=lambda _: None, clock=clock))


@pytest.mark.parametrize(("gpu", "model", "seed"), [("A100-80GB", "m", 5), ("A10", "m", 6), ("A100-80GB", "v", 7)])
def test_the_row_describes_the_engine(gpu: str, model: str, seed: int) -> None:
    config = config_of(gpu=gpu, models=(model,), seed=seed)
    (found,) = profiles_of(config, limit_s=600.0)
    bias, row, truth = bias_of(config), found.row, found.before
    assert truth is not None
    assert (row.gpu, row.n_gpu, row.model, row.origin) == (gpu, 1, truth.model, "measured")
    assert row.weights_gb == pytest.approx(truth.weights_gb, rel=0.001)
    assert row.kv_bytes_per_token == pytest.approx(truth.kv_bytes_per_token, rel=0.01)
    assert row.kv_capacity_tokens == truth.kv_capacity_tokens
    for sequences, context in ((1, 500), (32, 16_000), (64, 5_000), (200, 10_000)):
        assert row.decode_step_s(sequences, context) == pytest.approx(bias * truth.decode_step_s(sequences, context), rel=0.05)
    for tokens in (500, 1_500):
        assert row.prefill_s(tokens) == pytest.approx(bias * truth.prefill_s(tokens), rel=0.1)
    # Also of a context too short to measure: there it is the assumed one.
    assert row.prefill_ms_per_token_squared == pytest.approx(bias * truth.prefill_ms_per_token_squared, rel=0.5)
    assert found.measured.prefill_chunk_tokens == config.agent.simulated.prefill_chunk_tokens
    # One cold load, a few warm ones and KV transfers: each with 5% of noise.
    assert row.load_disk_to_cpu_s == pytest.approx(bias * truth.load_disk_to_cpu_s, rel=0.2)
    assert row.load_cpu_to_gpu_s == pytest.approx(bias * truth.load_cpu_to_gpu_s, rel=0.1)
    assert row.kv_swap_us_per_token == pytest.approx(bias * truth.kv_swap_us_per_token, rel=0.15)
    assert row.recompute_us_per_token == pytest.approx(bias * truth.recompute_us_per_token, rel=0.15)
    assert found.measured.notes == []
    assert found.measured.engine_s < 200.0


def test_a_first_profile_of_a_text_server_is_measured_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    server = RunningTextServer().start()
    try:
        config = AgentConfig.model_validate({
            "models": [{"name": MODEL, "profile": MODEL, "facts": asdict(facts_of(MODEL)), "context_tokens_max": 2_000}],
            "agent": {
                "gpu": "A100-80GB", "engine": "openai", "models": [MODEL],
                "openai": {"base_url": server.url, "api_key_env": "SERVER_KEY", "output": "text"},
            },
        })  # fmt: skip
        measuring = profile_engine(config, SHIPPED, (), limit_s=600.0, say=lambda _: None, clock=time.monotonic, extent=FIRST)
        (found,) = asyncio.run(measuring)
    finally:
        server.kill()
    assert (found.row.gpu, found.row.model, found.row.origin) == ("A100-80GB", MODEL, "measured")
    assert {each.tokens for each in found.measured.prefills if not each.resumed} == {16, 128, 512, 1_024}
    assert {each.sequences for each in found.measured.windows} == {1, 4, 16}
    # A step of the double is a millisecond and what sleeping so long costs this machine, whatever the batch; a window whose first token
    # was held up is shorter.
    steps_s = [each.seconds / each.steps for each in found.measured.windows]
    assert statistics.median(steps_s) > 0.001
    assert 0.5 * min(steps_s) < found.row.decode_step_s(4, 1_000) < 2.0 * max(steps_s)
    assert not any("left no time" in note for note in found.measured.notes)


def test_one_model_of_each_profile_unless_they_are_named() -> None:
    config = config_of(models=("m", "same", "v"), time_scale=50.0)

    def profiled(*names: str) -> list[str]:
        return [each.measured.model for each in profiles_of(config, *names, limit_s=100_000.0)]

    assert profiled() == ["m", "v"]
    assert profiled("same") == ["same"]
    with pytest.raises(ConfigError, match=r"nobody: not a model of this agent; may be m, same, v"):
        profiled("nobody")


def test_the_limit_leaves_out_measurements_without_time() -> None:
    (found,) = profiles_of(config_of(), limit_s=17.0)
    assert found.measured.engine_s < 30.0
    assert any("left no time for KV transfers" in note for note in found.measured.notes)
    assert found.row.kv_swap_us_per_token == 6.2
    assert found.row.decode_a_ms == pytest.approx(bias_of(config_of()) * 12.0, rel=0.1)


def test_a_limit_too_short_for_a_fit_is_an_error() -> None:
    with pytest.raises(ProfilingFailed, match="too few measurements"):
        profiles_of(config_of(), limit_s=1.0)


def test_an_engine_that_cannot_offload_is_profiled_without() -> None:
    config = config_of(host_kv_gb=0.0, time_scale=50.0)
    (found,) = profiles_of(config, limit_s=300.0)
    assert "the engine cannot offload" in " ".join(found.measured.notes)
    assert found.row.kv_swap_us_per_token == 6.2


def test_an_engine_without_host_memory_is_profiled_without_loads() -> None:
    config = config_of(host_memory_gb=1.0, time_scale=50.0)
    (found,) = profiles_of(config, limit_s=300.0)
    assert "loads from disk were not measured" in " ".join(found.measured.notes)
    assert (found.row.load_disk_to_cpu_s, found.row.load_cpu_to_gpu_s, found.row.weights_gb) == (4.5, 0.84, 14.48)


class _Engine(SimulatedEngine):
    """The simulated one, with a fault that a test sets. `slow_back`: KV takes twice as long from host memory as to it. `prompts`: of the
    runs that it was given, except those that continue."""

    fails = False
    silent = False
    stopped = False
    slow_back = False
    prompts: list[TokenPrompt]

    @classmethod
    def of(cls, made: AgentEngine) -> _Engine:
        made.engine.__class__ = cls
        assert isinstance(made.engine, cls)
        made.engine.prompts = []
        return made.engine

    async def add(self, request: EngineRequest) -> None:
        if isinstance(request.prompt, TokenPrompt) and not request.produced:
            self.prompts.append(request.prompt)
        if not self.silent:
            await super().add(request)

    async def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        found = await super().restore(run_ids)
        if self.slow_back:
            await asyncio.sleep(loop.time() - began_s)
        return found

    async def outputs(self) -> Sequence[EngineOutput]:
        found = await super().outputs()
        if self.fails:
            return [
                EngineOutput(each.run_id, b"", 0.0, 0.0, 0.0, failure=EngineFailure(kind=FailureKind.BROKEN, message="on fire"))
                for each in found
            ]
        return found

    async def stop(self) -> None:
        self.stopped = True
        await super().stop()


@pytest.fixture
async def engine() -> AsyncIterator[_Engine]:
    made = _Engine.of(engine_of(config_of(), SHIPPED))
    await made.start()
    yield made
    await made.stop()


def profiler_of(engine: Engine, clock: Callable[[], float] = time.monotonic) -> Profiler:
    spec = next(model.spec() for model in config_of().models if model.name == "m")
    return Profiler(engine, spec, clock=clock, time_scale=SCALE, limit_s=600.0)


async def test_a_failing_engine_ends_it_with_its_words(engine: _Engine) -> None:
    engine.fails = True
    with pytest.raises(ProfilingFailed, match="on fire"):
        await profiler_of(engine).measure(5.0, "p")
    assert engine.stats().running == 0


async def test_a_silent_engine_ends_it_in_time(engine: _Engine) -> None:
    engine.silent = True
    with pytest.raises(ProfilingFailed, match=r"made no output for 0\.2 s"):
        await profiler_of(engine).measure(0.2, "p")


def test_a_model_that_is_active_already_is_measured_there() -> None:
    async def measured(clock: Callable[[], float]) -> tuple[Measurements, EngineStats]:
        engine = engine_of(config_of(), SHIPPED, clock=clock).engine
        await engine.load_model("m", Tier.ACTIVE)
        found = await profiler_of(engine, clock).measure(5.0, "p")
        return found, engine.stats()

    found, stats = in_virtual_time(measured)
    assert found.loads_cold_s == []
    assert len(found.loads_warm_s) == 3
    assert fit(found).decode_error < 0.05
    assert (stats.running, stats.waiting, stats.offloaded, stats.host_kv_used_tokens) == (0, 0, 0, 0)


def test_the_slower_way_of_a_kv_transfer_counts_and_no_prefix_cache_helps() -> None:
    async def measured(clock: Callable[[], float]) -> tuple[Measurements, list[TokenPrompt]]:
        engine = _Engine.of(engine_of(config_of(), SHIPPED, clock=clock))
        engine.slow_back = True
        return await profiler_of(engine, clock).measure(5.0, "p"), engine.prompts

    found, prompts = in_virtual_time(measured)
    truth_us = bias_of(config_of()) * 6.2
    assert fit(found).figures["kv_swap_us_per_token"].value == pytest.approx(2.0 * truth_us, rel=0.2)
    assert len({tuple(prompt.ids[:16]) for prompt in prompts}) == len(prompts), "no prompt begins as another does"


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_is_stopped_however_it_ends(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    engines: list[_Engine] = []

    def seen(config: AgentConfig, profiles: ProfileSnapshot, *, clock: Callable[[], float]) -> AgentEngine:
        made = engine_of(config, profiles, clock=clock)
        engines.append(_Engine.of(made))
        engines[0].fails = fails
        return made

    monkeypatch.setattr(session, "engine_of", seen)
    with pytest.raises(ProfilingFailed, match="on fire") if fails else nullcontext():
        profiles_of(config_of(time_scale=50.0), limit_s=100.0)
    assert [engine.stopped for engine in engines] == [True]


async def test_a_cancelled_run_leaves_nothing_on_the_engine(engine: _Engine) -> None:
    task = asyncio.create_task(profiler_of(engine).measure(5.0, "p"))
    while engine.stats().running < 16:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.offloaded) == (0, 0, 0)
    assert [each for each in asyncio.all_tasks() if each.get_name().startswith("profiling")] == []


async def test_a_stop_in_the_middle_gives_nothing() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, stop.set)
    assert await until_stopped(config_of(time_scale=1.0), SHIPPED, (), limit_s=600.0, say=lambda _: None, stop=stop) == []
    assert [each for each in asyncio.all_tasks() if each.get_name().startswith("profiling")] == []
