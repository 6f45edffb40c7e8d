"""The tiers of models on CUDA and on CPUs, over engine processes that sleep as vLLM does on a GPU of the tests' own (`sleeping_gpu`)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from qlm_agent.engines.port import EngineRequest, ModelLoadFailed, Tier, TokenPrompt
from qlm_agent.engines.vllm.engine_runs import EngineRuns
from qlm_agent.engines.vllm.placement import Placement
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.process.child import Child
from qlm_agent.engines.vllm.process.template import Template
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_core.vocabulary.errors import ConfigError
from sleeping_gpu import CONFIG, Gpu, ThreadTemplate, model_folder
from sleeping_gpu import KV_BYTES as KV
from sleeping_gpu import WEIGHTS_BYTES as WEIGHTS

MODELS = ("a", "b", "c", "d")
DEADLINE_S = 20.0


class Host:
    """A GPU that holds one model and a half, or a CPU, and the placement of four models on it; `held`: models that host memory has room
    for; `unlike`: where the second model differs from the others."""

    def __init__(self, folder: Path, held: float, *, device: str = "cuda", unlike: Sequence[tuple[str, Any]] = (), **settings: Any) -> None:
        self.gpu = Gpu(models=1.5 if device == "cuda" else 2.0, weights_bytes=WEIGHTS, kv_bytes=KV)
        self.budget_bytes = int(held * WEIGHTS)
        self.ended: list[str] = []
        self.runs = EngineRuns()
        models: dict[str, dict[str, Any]] = {name: {"weights": model_folder(folder / name), "context_tokens_max": 64} for name in MODELS}
        for name, value in unlike:
            if name in CONFIG:
                (folder / "b" / "config.json").write_text(json.dumps({**CONFIG, name: value}))
            else:
                models["b"][name] = value
        known = {"device": device, "kv_cache_gb": (KV + 1) / 1e9, "host_memory_gb": held * WEIGHTS / 1e9, **settings}
        self.placement = Placement(
            {name: VllmModel(name=name, **fields) for name, fields in models.items()},
            VllmSettings(**known),
            cast(Template, ThreadTemplate(self.gpu)),
            self.runs,
            batch_max=4,
            n_gpu=1,
            on_step=lambda child, frame: None,
            on_end=lambda child, why: self.ended.append(why),
        )

    async def load(self, *steps: tuple[str, Tier]) -> None:
        for model, tier in steps:
            await self.placement.load(model, tier)

    def tiers(self) -> str:
        """The first letters, of all models in turn."""
        return "".join(self.placement.tier(model).value[0] for model in MODELS)

    async def settled(self) -> None:
        """Processes that were ended have given their memory back."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.gpu.engines) != len(self.placement.children):
                await asyncio.sleep(0.001)

    def check(self) -> None:
        """Only the active model has GPU memory; host memory has no more than its budget."""
        assert self.gpu.total_bytes - self.gpu.free_bytes == (WEIGHTS + KV if self.placement.active else 0)
        assert self.gpu.pinned_bytes <= self.budget_bytes


Make = Callable[..., Host]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Host] = []

    def make(held: float, **settings: Any) -> Host:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Host(folder, held, **settings))
        return made[-1]

    yield make
    for host in made:
        await host.placement.stop()


async def test_a_model_that_leaves_sleeps_with_its_weights_in_host_memory(make: Make) -> None:
    host = make(2.5)
    await host.load(("a", Tier.ACTIVE), ("b", Tier.ACTIVE))
    assert (host.tiers(), host.gpu.pinned_bytes) == ("wacc", WEIGHTS)
    await host.load(("a", Tier.ACTIVE))
    assert (host.tiers(), host.gpu.processes, host.gpu.reads) == ("awcc", 2, [])
    host.check()


async def test_a_model_that_host_memory_does_not_hold_drops_its_weights_when_it_leaves(make: Make) -> None:
    host = make(1.5)
    await host.load(("a", Tier.ACTIVE), ("b", Tier.ACTIVE))
    assert (host.tiers(), host.gpu.pinned_bytes, len(host.placement.children)) == ("cacc", 0, 2)
    await host.load(("a", Tier.ACTIVE))
    assert (host.tiers(), host.gpu.processes) == ("accc", 2)
    assert [Path(each).name for each in host.gpu.reads] == ["a"]


async def test_without_keep_cold_such_a_model_has_no_process(make: Make) -> None:
    host = make(1.5, keep_cold=False)
    await host.load(("a", Tier.ACTIVE), ("b", Tier.ACTIVE))
    await host.settled()
    assert [child.model for child in host.placement.children] == ["b"]
    await host.load(("a", Tier.ACTIVE))
    assert (host.tiers(), host.gpu.processes) == ("accc", 3)


@pytest.mark.parametrize("keep_cold", [True, False])
async def test_a_process_that_stayed_for_its_offloaded_runs_ends_after_them(make: Make, keep_cold: bool) -> None:
    """It holds the pool of their KV, which is pinned."""
    host = make(1.5, keep_cold=keep_cold)
    await host.load(("a", Tier.ACTIVE))
    host.runs.add(EngineRequest(run_id="r", model="a", prompt=TokenPrompt(ids=[1]), prompt_tokens=1, output_tokens_max=5), sent=True)
    host.runs.of("a")[0].offloaded = True
    await host.load(("b", Tier.ACTIVE))
    await host.placement.tidy()
    assert [child.model for child in host.placement.children] == ["a", "b"]
    host.runs.drop(["r"])
    await host.placement.tidy()
    assert [child.model for child in host.placement.children] == (["a", "b"] if keep_cold else ["b"])


async def test_a_warm_model_that_becomes_cold_gives_its_host_memory_back(make: Make) -> None:
    """vLLM takes a sleeping engine no deeper, and says nothing."""
    host = make(2.5)
    await host.load(("a", Tier.ACTIVE), ("b", Tier.ACTIVE), ("a", Tier.COLD))
    await host.settled()
    assert (host.tiers(), host.gpu.pinned_bytes) == ("cacc", 0)
    await host.load(("a", Tier.ACTIVE))
    assert host.tiers() == "awcc"


async def test_the_active_model_becomes_cold_without_weights(make: Make) -> None:
    host = make(2.5)
    await host.load(("a", Tier.ACTIVE), ("a", Tier.COLD))
    assert (host.tiers(), host.gpu.pinned_bytes, len(host.placement.children)) == ("cccc", 0, 1)
    host.check()
    await host.load(("a", Tier.WARM))
    assert (host.tiers(), host.gpu.pinned_bytes, host.gpu.processes) == ("wccc", WEIGHTS, 1)


async def test_beside_the_active_model_another_is_read_into_host_memory(make: Make) -> None:
    host = make(2.5)
    await host.load(("a", Tier.ACTIVE), ("b", Tier.WARM))
    assert (host.tiers(), host.gpu.processes) == ("awcc", 1)
    await host.load(("b", Tier.ACTIVE))
    assert (host.tiers(), host.gpu.processes) == ("wacc", 2)
    host.check()


async def test_weights_that_are_not_there_are_named(make: Make) -> None:
    host = make(2.5)
    await host.load(("a", Tier.ACTIVE))
    (Path(host.placement._models["b"].weights) / "model.safetensors").unlink()
    for tier in (Tier.WARM, Tier.ACTIVE):
        with pytest.raises(ModelLoadFailed, match=r"model b: models\.weights"):
            await host.load(("b", tier))
    assert host.tiers() == "accc"
    host.check()


async def test_weights_that_the_active_model_left_in_host_memory_make_room(make: Make) -> None:
    host = make(2.5)
    await host.load(("a", Tier.ACTIVE), ("b", Tier.ACTIVE), ("a", Tier.ACTIVE))
    assert host.gpu.pinned_bytes == 2 * WEIGHTS  # that of the active one is kept for its next sleep
    await host.load(("c", Tier.WARM), ("d", Tier.WARM))
    await host.settled()
    assert (host.tiers(), host.gpu.pinned_bytes) == ("acww", 0)


async def test_a_sleep_that_keeps_the_memory_ends_the_process(make: Make) -> None:
    host = make(2.5, step_timeout_s=60.0)
    await host.load(("a", Tier.ACTIVE))
    host.gpu.sleep_keeps = 1
    with capture_logs() as logs:
        await host.load(("b", Tier.ACTIVE))
    assert "the memory is still held" in next(log["error"] for log in logs if log["event"] == "vllm_not_asleep")
    await host.settled()
    assert host.tiers() == "cacc"
    host.check()


async def test_a_wake_that_fails_is_reported_and_the_model_starts_cold(make: Make) -> None:
    host = make(2.5)
    await host.load(("a", Tier.ACTIVE), ("b", Tier.ACTIVE))
    host.gpu.wake_fails = 1
    with capture_logs() as logs:
        await host.load(("a", Tier.ACTIVE))
    line = next(log for log in logs if log["event"] == "vllm_not_woken")
    assert ("CUDA out of memory" in line["error"], line["then"]) == (True, "cold start")
    await host.settled()
    assert (host.tiers(), host.gpu.processes) == ("awcc", 3)
    host.check()


async def test_a_load_that_fails_leaves_the_model_that_was_there(make: Make) -> None:
    host = make(2.5)
    await host.load(("a", Tier.ACTIVE))
    host.gpu.load_fails = 1
    with pytest.raises(ModelLoadFailed, match="CUDA out of memory"):
        await host.load(("b", Tier.ACTIVE))
    assert (host.tiers(), host.gpu.processes) == ("accc", 2)
    await host.settled()
    host.check()


async def test_where_no_process_can_be_started_a_load_fails_and_the_agent_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that starts them was killed, and vLLM cannot be imported again for want of memory."""
    host = make(2.5)
    await host.load(("a", Tier.ACTIVE))

    async def fork(template: ThreadTemplate, make: object) -> Child:
        raise ConfigError("agent.engine: vllm: python ended before vLLM was imported")

    with monkeypatch.context() as patch:
        patch.setattr(ThreadTemplate, "fork", fork)
        with pytest.raises(ModelLoadFailed, match=r"model b could not be loaded: agent\.engine: vllm: python ended"):
            await host.load(("b", Tier.ACTIVE))
    assert host.tiers() == "accc"
    host.check()


@pytest.mark.parametrize("keep_cold", [True, False])
@pytest.mark.parametrize("held", [0.5, 1.5, 2.5, 3.5])
async def test_any_order_of_loads_keeps_to_the_memory_there_is(make: Make, held: float, keep_cold: bool) -> None:
    host = make(held, keep_cold=keep_cold)
    chance = random.Random(f"{held}{keep_cold}")
    for _ in range(60):
        model, tier = chance.choice(MODELS), chance.choice(list(Tier))
        try:
            await host.placement.load(model, tier)
        except ModelLoadFailed:
            assert (tier, held) == (Tier.WARM, 0.5)
        else:
            assert host.placement.tier(model) is tier
        await host.settled()
        host.check()


# On a CPU: processes side by side as far as host memory goes, else one that takes other weights in place ---------------------------


SWAP = (("a", Tier.ACTIVE), ("b", Tier.ACTIVE))


async def killed(host: Host, model: str) -> None:
    """Returns when its process is known to have ended, with its memory."""
    child = host.placement.child(model)
    assert child is not None
    child.kill("killed by the test")
    async with asyncio.timeout(DEADLINE_S):
        while not child.ended:
            await asyncio.sleep(0.001)
    await host.settled()


async def test_on_a_cpu_a_model_that_host_memory_holds_keeps_its_process(make: Make) -> None:
    host = make(2.5, device="cpu")
    await host.load(*SWAP)
    assert host.tiers() == "wacc"
    assert (host.gpu.processes, host.gpu.reads, len(host.placement.children)) == (2, [], 2)


@pytest.mark.parametrize("held", [0.5, 1.5])
async def test_on_a_cpu_that_holds_one_model_its_process_takes_the_others_weights(make: Make, held: float) -> None:
    host = make(held, device="cpu")
    await host.load(*SWAP)
    assert host.tiers() == "cacc"
    assert (host.gpu.processes, [Path(each).name for each in host.gpu.reads]) == (1, ["b"])
    assert [child.model for child in host.placement.children] == ["b"]


@pytest.mark.parametrize("unlike", [("context_tokens_max", 32), ("chat_template", "other.jinja"), ("num_hidden_layers", 2)])
async def test_a_model_that_is_unlike_it_has_a_process_of_its_own(make: Make, unlike: tuple[str, object]) -> None:
    host = make(1.5, device="cpu", unlike=[unlike])
    await host.load(*SWAP)
    assert host.tiers() == "cacc"
    assert (host.gpu.processes, host.gpu.reads) == (2, [])
    assert [child.model for child in host.placement.children] == ["b"]


async def test_on_a_cpu_a_warm_model_whose_process_ends_is_cold(make: Make) -> None:
    host = make(2.5, device="cpu")
    await host.load(*SWAP)
    await killed(host, "a")
    assert host.tiers() == "cacc"


async def test_an_active_model_whose_process_ended_is_cold_once_another_is_active(make: Make) -> None:
    host = make(2.5, device="cpu")
    await host.load(("a", Tier.ACTIVE))
    await killed(host, "a")
    await host.load(("b", Tier.ACTIVE))
    assert host.tiers() == "cacc"
    await host.load(("a", Tier.WARM))
    assert (host.tiers(), host.placement.child("a") is None) == ("wacc", False)
