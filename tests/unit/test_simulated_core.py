"""The simulated engine without a clock: models, KV swaps and the order of what happens, at times that the test chooses."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qlm_agent.engines.policies.port import EnginePolicy
from qlm_agent.engines.policies.registry import FirstComeFirstServed, engine_policy
from qlm_agent.engines.port import EngineBusy, EngineOutput, EngineRequest, Tier, TokenPrompt
from qlm_agent.engines.simulated.batching.kv_blocks import BLOCK_TOKENS
from qlm_agent.engines.simulated.batching.transfers import OperationEnded
from qlm_agent.engines.simulated.core import SimulatedCore, SimulatedLimits, SimulatedModel
from qlm_agent.engines.simulated.timing import InstanceNoise
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, TOKEN_BYTES, answer_tokens, prompt_digest

PROFILE = next(row for row in shipped_snapshot().hardware if (row.gpu, row.n_gpu, row.model) == ("A100-80GB", 1, "Mistral-7B"))
MODELS = ("a", "b")


def make(policy: EnginePolicy | None = None, **limits: float) -> SimulatedCore:
    models = {
        name: SimulatedModel(spec=ModelSpec(name=name, profile="Mistral-7B", context_tokens_max=8192), profile=PROFILE) for name in MODELS
    }
    noise = InstanceNoise(seed=1, instance="i", step_noise=0.05, bias_max=0.0)
    return SimulatedCore(models, noise, policy or FirstComeFirstServed(), replace(SimulatedLimits(tell_every_s=0.0), **limits))  # type: ignore[arg-type]


def prompt(number: int, tokens: int, answer: int) -> list[int]:
    return [number] * (tokens - 1) + [LENGTH_TOKEN_BASE + answer]


def request(run_id: str, *, model: str = "a", number: int = 1, tokens: int = 20, answer: int = 100) -> EngineRequest:
    ids = TokenPrompt(ids=prompt(number, tokens, answer))
    return EngineRequest(run_id=run_id, model=model, prompt=ids, prompt_tokens=tokens, output_tokens_max=5000)


class World:
    """A core, its time, and all that it reported."""

    def __init__(self, core: SimulatedCore) -> None:
        self.core = core
        self.now_s = 0.0
        self.tokens: dict[str, bytes] = {}
        self.last: dict[str, EngineOutput] = {}
        self.ended: dict[int, OperationEnded] = {}

    def read(self) -> None:
        self.core.advance(self.now_s)
        for output in self.core.outputs(self.now_s):
            assert output.run_id not in self.last or self.last[output.run_id].finish is None, "output after the end"
            self.tokens[output.run_id] = self.tokens.get(output.run_id, b"") + output.token_ids
            self.last[output.run_id] = output
        for ended in self.core.ended():
            self.ended[ended.number] = ended

    def to(self, now_s: float) -> None:
        """Makes all steps until then, each at its own time."""
        while (due_s := self.core.next_due_s) is not None and due_s <= now_s:
            self.now_s = max(self.now_s, due_s)
            self.read()
        self.now_s = now_s
        self.read()

    def end_of(self, number: int) -> OperationEnded:
        self.read()
        while number not in self.ended:
            assert self.core.next_due_s is not None, "it waits for ever"
            self.to(self.core.next_due_s)
        return self.ended[number]

    def end_all(self) -> None:
        while (due_s := self.core.next_due_s) is not None:
            self.to(due_s)

    def load(self, model: str, tier: Tier) -> OperationEnded:
        return self.end_of(self.core.load(self.now_s, model, tier))

    def offload(self, *run_ids: str) -> OperationEnded:
        return self.end_of(self.core.offload(self.now_s, run_ids))

    def restore(self, *run_ids: str) -> OperationEnded:
        return self.end_of(self.core.restore(self.now_s, run_ids))

    def start(self, run_id: str, **fields: int | str) -> None:
        """Adds a run and waits for its first token."""
        self.core.add(self.now_s, request(run_id, **fields))  # type: ignore[arg-type]
        while run_id not in self.tokens:
            assert self.core.next_due_s is not None
            self.to(self.core.next_due_s)


@pytest.fixture
def world() -> World:
    world = World(make())
    world.load("a", Tier.ACTIVE)
    return world


def test_loads_take_their_times() -> None:
    world = World(make())
    disk_s, bus_s = PROFILE.load_disk_to_cpu_s, PROFILE.load_cpu_to_gpu_s
    assert world.load("a", Tier.ACTIVE).took_s == pytest.approx(disk_s + bus_s, rel=0.2)
    assert world.load("a", Tier.ACTIVE).took_s == 0.0
    assert world.load("b", Tier.WARM).took_s == pytest.approx(disk_s, rel=0.2)
    assert world.load("b", Tier.ACTIVE).took_s == pytest.approx(bus_s, rel=0.2)
    assert (world.core.tier("a"), world.core.tier("b")) == (Tier.WARM, Tier.ACTIVE)


def test_a_warm_model_becomes_active_beside_the_warming_of_another() -> None:
    world = World(make())
    world.load("b", Tier.WARM)
    warm, active = world.core.load(world.now_s, "a", Tier.WARM), world.core.load(world.now_s, "b", Tier.ACTIVE)
    world.end_all()
    assert world.ended[active].took_s == pytest.approx(PROFILE.load_cpu_to_gpu_s, rel=0.2)
    assert world.ended[warm].took_s == pytest.approx(PROFILE.load_disk_to_cpu_s, rel=0.2)


def test_loads_of_one_model_and_of_the_gpu_go_one_after_another() -> None:
    world = World(make())
    core = world.core
    numbers = [core.load(0.0, "a", Tier.WARM), core.load(0.0, "a", Tier.ACTIVE), core.load(0.0, "b", Tier.ACTIVE)]
    world.end_all()
    disk_s, bus_s = PROFILE.load_disk_to_cpu_s, PROFILE.load_cpu_to_gpu_s
    took_s = [world.ended[number].took_s for number in numbers]
    assert took_s == pytest.approx([disk_s, disk_s + bus_s, 2 * (disk_s + bus_s)], rel=0.2)
    assert (core.tier("a"), core.tier("b")) == (Tier.WARM, Tier.ACTIVE)


def test_a_late_step_makes_the_same_as_many_early_ones() -> None:
    outcomes = []
    for step_s in (0.01, 1000.0):
        world = World(make())
        world.load("a", Tier.ACTIVE)
        for number in range(5):
            world.core.add(world.now_s, request(str(number), number=number, answer=50 + number))
        offload = world.core.offload(world.now_s + 0.5, ["1", "2"])
        warm = world.core.load(world.now_s + 0.5, "b", Tier.WARM)
        until_s = world.now_s + 1000.0
        at_s = world.now_s + 0.5
        while at_s < until_s:
            at_s = min(until_s, at_s + step_s)
            world.core.advance(at_s)
            world.now_s = at_s
            world.read()
        outcomes.append((world.tokens, {name: out.last_s for name, out in world.last.items() if out.finish}, world.ended[offload].ended_s))
        assert world.ended[offload].run_ids == ("1", "2")
        assert world.ended[warm].error is None
    assert outcomes[0] == outcomes[1]


def test_a_pause_reports_the_output_so_far_at_once() -> None:
    core = make(tell_every_s=1e9)
    world = World(core)
    world.load("a", Tier.ACTIVE)
    core.add(world.now_s, request("r", answer=100))
    core.advance(world.now_s + 0.5)
    core.pause(world.now_s + 0.5)
    assert core.next_due_s is not None
    made = sum(len(output.token_ids) for output in core.outputs(world.now_s + 0.5)) // TOKEN_BYTES
    assert 1 < made < 100
    assert core.next_due_s is None


def test_an_offload_takes_the_profiles_time_and_then_frees_the_kv(world: World) -> None:
    world.start("big", tokens=4000, answer=2000)
    world.start("small", number=2, answer=2000)
    used = world.core.stats().kv_used_tokens
    began_s, tokens = world.now_s, len(world.tokens["small"])
    number = world.core.offload(world.now_s, ["big"])
    expected_s = 4000 * PROFILE.kv_swap_us_per_token * 1e-6
    world.to(began_s + 0.5 * expected_s)
    stats = world.core.stats()
    assert (stats.running, stats.offloaded) == (1, 1)
    assert stats.kv_used_tokens >= used - BLOCK_TOKENS, "freed before it was copied"
    ended = world.end_of(number)
    assert ended.run_ids == ("big",)
    assert ended.took_s == pytest.approx(expected_s, rel=0.3)
    assert world.core.stats().kv_used_tokens < 3 * BLOCK_TOKENS
    assert world.core.stats().host_kv_used_tokens == pytest.approx(4000, abs=20)
    before = len(world.tokens["big"])
    world.to(world.now_s + 1.0)
    assert len(world.tokens["big"]) == before, "an offloaded run made output"
    assert len(world.tokens["small"]) > tokens + 20 * TOKEN_BYTES, "the others stood still"


def test_a_restored_run_computes_nothing_again(world: World) -> None:
    world.start("r", tokens=4000, answer=300)
    world.offload("r")
    produced = len(world.tokens["r"]) // TOKEN_BYTES
    began_s = world.now_s
    ended = world.restore("r")
    assert ended.run_ids == ("r",)
    assert ended.took_s == pytest.approx(4000 * PROFILE.kv_swap_us_per_token * 1e-6, rel=0.3)
    world.to(world.now_s + 3 * PROFILE.decode_step_s(1, 4000))
    assert world.now_s - began_s < 0.5 * PROFILE.prefill_s(4000)
    assert len(world.tokens["r"]) // TOKEN_BYTES in (produced + 2, produced + 3)
    world.end_all()
    assert world.tokens["r"] == answer_tokens(prompt_digest("a", prompt(1, 4000, 300)), 0, 300, 32_000)
    assert world.core.stats().host_kv_used_tokens == world.core.stats().kv_used_tokens == 0


def test_a_model_is_busy_while_kv_is_on_its_way(world: World) -> None:
    world.start("r", tokens=2000)
    offload = world.core.offload(world.now_s, ["r"])
    assert isinstance(world.ended.get(world.core.load(world.now_s, "b", Tier.ACTIVE), world.load("b", Tier.ACTIVE)).error, EngineBusy)
    world.end_of(offload)
    assert world.load("b", Tier.ACTIVE).error is None


@pytest.mark.parametrize("policy", ["fcfs", "edf", "fastserve"])
@pytest.mark.parametrize("seed", range(6))
def test_output_is_exact_and_nothing_leaks_in_any_order_of_calls(seed: int, policy: str) -> None:
    dice = random.Random(seed)
    kv_bytes = PROFILE.kv_bytes_per_token / 1e9
    world = World(make(engine_policy(policy, {}), kv_capacity_tokens=1600, batch_max=6, host_kv_gb=dice.choice([400, 2000]) * kv_bytes))
    added: dict[str, tuple[str, list[int]]] = {}
    aborted: set[str] = set()
    world.load("a", Tier.ACTIVE)
    for number in range(300):
        world.to(world.now_s + dice.expovariate(10.0))
        live = sorted(run_id for run_id in added if run_id not in aborted and not (run_id in world.last and world.last[run_id].finish))
        some = dice.sample(live, min(len(live), dice.randint(1, 3)))
        match dice.choices(["add", "offload", "restore", "abort", "load", "pause", "resume"], [6, 4, 5, 1, 1, 0.3, 1])[0]:
            case "add":
                model, tokens, answer = world.core.stats().active_model, dice.randint(1, 300), dice.randint(1, 200)
                if model and world.core.tier(model) is Tier.ACTIVE:
                    added[str(number)] = (model, prompt(number, tokens, answer))
                    world.core.add(world.now_s, request(str(number), model=model, number=number, tokens=tokens, answer=answer))
            case "offload":
                world.core.offload(world.now_s, some)
            case "restore":
                world.core.restore(world.now_s, some)
            case "abort":
                world.core.abort(world.now_s, some[:1])
                aborted.update(some[:1])
            case "load":
                world.core.load(world.now_s, dice.choice(MODELS), dice.choice([Tier.ACTIVE, Tier.ACTIVE, Tier.WARM]))
            case "pause":
                world.core.pause(world.now_s)
            case "resume":
                world.core.resume(world.now_s)
        stats = world.core.stats()
        assert stats.kv_used_tokens <= stats.kv_capacity_tokens
        assert stats.host_kv_used_tokens <= stats.host_kv_capacity_tokens
    world.core.resume(world.now_s)
    for _ in range(50):
        for model in MODELS:
            world.end_all()
            world.load(model, Tier.ACTIVE)
            world.core.restore(world.now_s, sorted(added))
            world.end_all()
    for run_id, (model, ids) in added.items():
        expected = answer_tokens(prompt_digest(model, ids), 0, ids[-1] - LENGTH_TOKEN_BASE, 32_000)
        if run_id in aborted:
            assert expected.startswith(world.tokens.get(run_id, b""))
        else:
            assert world.tokens[run_id] == expected, run_id
    stats = world.core.stats()
    assert (stats.running, stats.waiting, stats.offloaded, stats.kv_used_tokens, stats.host_kv_used_tokens) == (0, 0, 0, 0, 0)


def test_a_shared_prefix_is_computed_once_while_its_model_is_active() -> None:
    world = World(make(shared_prefix_tokens=1_000))
    world.load("a", Tier.ACTIVE)
    for run_id, tokens, cached in (("first", 2_000, 0), ("second", 2_000, 992), ("all of it", 500, 496), ("a block", 16, 0)):
        began_s = world.now_s
        world.start(run_id, number=len(world.tokens), tokens=tokens, answer=1)
        assert world.last[run_id].cached_tokens == cached
        prefill_s = PROFILE.prefill_work_s(tokens, tokens**2) - PROFILE.prefill_work_s(cached, cached**2)
        assert world.now_s - began_s == pytest.approx(PROFILE.prefill_base_ms / 1e3 + prefill_s, rel=0.2)
    for model, tier in (("b", Tier.ACTIVE), ("a", Tier.ACTIVE)):
        world.load(model, tier)
    world.start("after a swap", tokens=2_000)
    assert world.last["after a swap"].cached_tokens == 0


def test_kv_is_that_of_whole_prompts() -> None:
    world = World(make(shared_prefix_tokens=1_000))
    world.load("a", Tier.ACTIVE)
    for number in range(3):
        world.start(str(number), number=number, tokens=2_000)
    assert world.core.stats().kv_used_tokens >= 6_000
