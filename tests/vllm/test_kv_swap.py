"""KV swap in vLLM: a request leaves the batch with its KV and continues exactly where it was, whatever happened meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from vllm_in_process import BLOCK_TOKENS, InProcess, prompt_of

GPU_BLOCKS, HOST_BLOCKS, SEATS = 24, 20, 4


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-cache", "no-prefix-cache"])
def made(request: pytest.FixtureRequest) -> Iterator[InProcess]:
    engine = InProcess(gpu_blocks=GPU_BLOCKS, host_blocks=HOST_BLOCKS, seats=SEATS, prefix_cache=request.param)
    yield engine
    engine.close()


@pytest.fixture
def vllm(made: InProcess) -> Iterator[InProcess]:
    yield made
    made.clear()
    assert made.gpu_blocks_free == GPU_BLOCKS, "GPU blocks are lost"
    assert made.scheduler.host_kv_used_tokens() == 0, "host blocks are lost"


def offload(vllm: InProcess, *run_ids: str) -> None:
    """Offloads runs and waits until their KV is in host memory."""
    assert vllm.scheduler.offload(run_ids) == list(run_ids)
    vllm.step_until(lambda: vllm.scheduler.offloaded().issuperset(run_ids))


def fill_gpu(vllm: InProcess) -> None:
    """Writes to every block of the GPU's KV."""
    names = [f"filler-{number}" for number in range(SEATS)]
    for number, name in enumerate(names):
        vllm.add(name, prompt=prompt_of(1000 + number, GPU_BLOCKS // SEATS * BLOCK_TOKENS - 8), answer=8)
    vllm.step(2)
    assert vllm.gpu_blocks_free == 0
    vllm.finish(*names)
    vllm.engine.reset_prefix_cache()


@pytest.mark.parametrize(
    ("prompt_tokens", "produced"), [(1, 1), (1, 31), (1, 33), (31, 1), (31, 2), (32, 1), (32, 2), (33, 31), (100, 28), (100, 29), (100, 30)]
)
def test_it_continues_exactly_where_it_was_after_others_wrote_over_its_blocks(vllm: InProcess, prompt_tokens: int, produced: int) -> None:
    prompt = prompt_of(7, prompt_tokens)
    expected = vllm.undisturbed(prompt=prompt, answer=60)
    vllm.add("r", prompt=prompt, answer=60)
    vllm.step_until(lambda: len(vllm.made["r"]) == produced)
    offload(vllm, "r")
    assert vllm.gpu_blocks_free == GPU_BLOCKS
    fill_gpu(vllm)
    assert len(vllm.made["r"]) == produced, "it made output while it was away"
    assert vllm.scheduler.restore(["r"]) == ["r"]
    assert vllm.scheduler.offloaded() == set()
    vllm.step()
    assert vllm.scheduled == {"r": 1}, "something was computed again"
    assert len(vllm.made["r"]) == produced + 1
    assert vllm.finish("r") == [expected]


def test_its_blocks_are_free_in_the_step_in_which_it_leaves(vllm: InProcess) -> None:
    prompt = prompt_of(1, 300)
    expected = vllm.undisturbed(prompt=prompt, answer=40)
    vllm.add("r", prompt=prompt, answer=40)
    vllm.step(5)
    assert vllm.scheduler.offload(["r"]) == ["r"]
    vllm.add("big", prompt=prompt_of(2, 500), answer=5)  # takes blocks that the step copies
    vllm.add("other", prompt=prompt_of(3, 200), answer=5)
    vllm.step()
    assert set(vllm.scheduled) == {"big", "other"}
    assert vllm.scheduler.offloaded() == {"r"}
    vllm.finish("big", "other")
    assert vllm.scheduler.restore(["r"]) == ["r"]
    assert vllm.finish("r") == [expected]


def test_there_and_back_between_two_steps(vllm: InProcess) -> None:
    prompt = prompt_of(4, 90)
    expected = vllm.undisturbed(prompt=prompt, answer=40)
    vllm.add("r", prompt=prompt, answer=40)
    vllm.step(9)
    assert vllm.scheduler.offload(["r"]) == ["r"]
    assert vllm.scheduler.restore(["r"]) == ["r"]
    vllm.step()
    assert vllm.scheduled == {"r": 1}
    assert vllm.finish("r") == [expected]


def test_blocks_that_two_share_go_with_one_and_stay_with_the_other(vllm: InProcess) -> None:
    shared = prompt_of(6, 4 * BLOCK_TOKENS)
    prompts = {"stays": [*shared, 5], "leaves": [*shared, 6, 7]}
    expected = {name: vllm.undisturbed(prompt=prompt, answer=50) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        vllm.add(name, prompt=prompt, answer=50)
        vllm.step(3)
    offload(vllm, "leaves")
    vllm.finish("stays")
    fill_gpu(vllm)
    assert vllm.scheduler.restore(["leaves"]) == ["leaves"]
    vllm.finish("leaves")
    assert {name: vllm.made[name] for name in prompts} == expected


def test_restored_runs_count_against_the_seats_at_once(vllm: InProcess) -> None:
    for number in range(SEATS):
        vllm.add(f"r{number}", prompt=prompt_of(number, 40), answer=20)
    vllm.step(2)
    offload(vllm, *(f"r{number}" for number in range(SEATS)))
    vllm.add("new", prompt=prompt_of(50, 10), answer=30)
    vllm.step()
    assert vllm.scheduler.restore([f"r{number}" for number in range(SEATS)]) == ["r0", "r1", "r2"]
    vllm.step()
    assert vllm.scheduled.keys() == {"new", "r0", "r1", "r2"}
    vllm.finish("r0", "r1", "r2")
    assert vllm.scheduler.restore(["r3"]) == ["r3"]
    vllm.finish("r3", "new")


def test_the_engine_rests_while_all_are_away(vllm: InProcess) -> None:
    vllm.add("r", prompt=prompt_of(9, 100), answer=20)
    vllm.step(2)
    assert vllm.scheduler.offload(["r"]) == ["r"]
    assert vllm.scheduler.offloaded() == set(), "the copy is made by the next step"
    assert vllm.scheduler.has_requests()
    vllm.step()
    assert vllm.scheduler.offloaded() == {"r"}
    assert not vllm.scheduler.has_requests()
    assert vllm.scheduler.restore(["r"]) == ["r"]
    assert vllm.scheduler.has_requests()
    vllm.finish("r")


@pytest.mark.parametrize("when", ["leaving", "away", "coming", "back"])
def test_abort_frees_all_that_it_holds(vllm: InProcess, when: str) -> None:
    vllm.add("r", prompt=prompt_of(9, 100), answer=50)
    vllm.add("other", prompt=prompt_of(8, 100), answer=50)
    vllm.step(4)
    assert vllm.scheduler.offload(["r"]) == ["r"]
    if when != "leaving":
        vllm.step()
    if when in ("coming", "back"):
        assert vllm.scheduler.restore(["r"]) == ["r"]
    if when == "back":
        vllm.step()
    vllm.abort("r")
    assert vllm.scheduler.host_kv_used_tokens() == 0
    assert vllm.scheduler.offloaded() == set()
    made = len(vllm.made["r"])
    (other,) = vllm.finish("other")
    assert len(vllm.made["r"]) == made
    vllm.finished.add("r")
    assert other == vllm.undisturbed(prompt=prompt_of(8, 100), answer=50)


def test_nobody_finds_blocks_that_an_abort_left_empty(vllm: InProcess) -> None:
    prompt = prompt_of(9, 100)
    expected = vllm.undisturbed(prompt=prompt, answer=20)
    vllm.add("r", prompt=prompt, answer=50)
    vllm.step(4)
    offload(vllm, "r")
    fill_gpu(vllm)
    assert vllm.scheduler.restore(["r"]) == ["r"]
    vllm.abort("r")
    vllm.finished.add("r")
    vllm.add("same", prompt=prompt, answer=20)
    assert vllm.finish("same") == [expected]


def test_restored_blocks_are_found_again(vllm: InProcess) -> None:
    vllm.add("r", prompt=prompt_of(9, 100), answer=50)
    vllm.step(4)
    offload(vllm, "r")
    fill_gpu(vllm)
    assert vllm.scheduler.restore(["r"]) == ["r"]
    vllm.step()
    vllm.add("same", prompt=prompt_of(9, 100), answer=20)
    vllm.step()
    cached = vllm.core.vllm_config.cache_config.enable_prefix_caching
    assert vllm.scheduled == {"r": 1, "same": 100 % BLOCK_TOKENS if cached else 100}
    vllm.finish("r", "same")


def test_preemption_for_want_of_kv_beside_those_that_are_away(vllm: InProcess) -> None:
    expected = [vllm.undisturbed(prompt=prompt_of(number, 180), answer=120) for number in range(4)]
    for number in range(4):
        vllm.add(f"r{number}", prompt=prompt_of(number, 180), answer=120)  # 6 blocks each at first, 10 at the end, of 24
    vllm.step(6)
    offload(vllm, "r0")
    vllm.finish("r1")
    vllm.step_until(lambda: vllm.scheduler.restore(["r0"]) == ["r0"])
    assert vllm.finish("r0", "r1", "r2", "r3") == expected
    assert vllm.scheduler.preemptions > 0, "the test gives more KV than it means to"


@pytest.mark.parametrize("seed", range(6))
def test_many_runs_in_any_order_of_events(vllm: InProcess, seed: int) -> None:
    dice = random.Random(seed)
    wanted = {f"r{number}": (prompt_of(seed * 10 + number, dice.randint(1, 150)), dice.randint(2, 90)) for number in range(8)}
    expected = {name: vllm.undisturbed(prompt=prompt, answer=answer) for name, (prompt, answer) in wanted.items()}
    to_add, added = list(wanted), []
    offloads = restores = 0
    for _ in range(250):
        match dice.choice(("add", "step", "step", "step", "offload", "restore", "reset")):
            case "add" if to_add:
                name = to_add.pop()
                prompt, answer = wanted[name]
                vllm.add(name, prompt=prompt, answer=answer, priority=dice.choice((0, 0, 1)))
                added.append(name)
            case "step":
                vllm.step(dice.randint(1, 3))
            case "offload" if added:
                offloads += len(vllm.scheduler.offload(dice.sample(added, dice.randint(1, min(3, len(added))))))
            case "restore" if added:
                restores += len(vllm.scheduler.restore(dice.sample(added, dice.randint(1, len(added)))))
            case "reset":
                vllm.engine.reset_prefix_cache()
    assert offloads
    assert restores

    def all_done() -> bool:
        vllm.scheduler.restore(sorted(vllm.scheduler.offloaded()))
        return vllm.finished.issuperset(added)

    vllm.step_until(all_done)
    assert {name: vllm.made[name] for name in added} == {name: expected[name] for name in added}
