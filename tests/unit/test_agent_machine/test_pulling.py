"""When the agent pulls and how much (QLM section 5, request pulling)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm_agent.decisions.events import ControlMessage, Message, Outcome
from qlm_core.operations.batch_size import ClassDemand

from .transcript import CAPACITY, HARDWARE, Transcript, ended, group, profile, pulled, waiting_groups

DONE = Outcome.DONE


def test_life_of_one_request() -> None:
    t = Transcript()
    assert t.register() == ["pull nothing"]
    assert t.answer_pull(head="m") == ["load m active"]
    assert t.loaded("m") == ["pull m x100"]
    assert t.answer_pull(pulled("1")) == ["start 1"]
    assert t.at(1.0).produce(("1", 1)) == ["emit 1[0:1]"]  # the first token at once
    assert t.answer_items("emit", DONE) == []
    assert t.at(1.01).produce(("1", 1)) == []
    assert t.at(1.03).produce(("1", 1)) == []
    assert t.wake() == ["emit 1[1:3]"]  # 50 ms after the first of them
    assert t.now_s == 1.06
    assert t.answer_items("emit", DONE) == []
    assert t.at(1.07).end(ended("1", 2)) == ["complete 1[3:5]=STOP"]  # the last ones with the end
    assert t.answer_items("complete", DONE) == ["forget 1 written"]
    assert len(t.machine.runs) == 0


def test_pulls_again_while_there_is_more_and_room() -> None:
    t = Transcript(batch_max=3)
    assert t.serve() == ["pull m x3"]
    assert t.answer_pull(pulled("1"), pulled("2"), head="m") == ["start 1", "start 2", "pull m x1"]
    assert t.answer_pull(pulled("3"), head="m") == ["start 3"]  # the batch is full
    assert t.end(ended("2", 5)) == ["pull m x1", "complete 2[0:5]=STOP"]  # a seat is free


def test_an_empty_queue_is_left_alone_until_a_message() -> None:
    t = Transcript(poll_s=1.0)
    t.serve()
    assert t.answer_pull() == []
    assert t.at(0.5).step(ControlMessage(message=Message.WAKE)) == ["pull m x100"]
    assert t.answer_pull() == []
    assert t.wake() == ["pull m x100"]  # a message may be lost: it looks by itself
    assert t.now_s == 1.0


def test_a_signal_during_a_pull_is_not_lost() -> None:
    t = Transcript()
    t.serve()
    assert t.step(ControlMessage(message=Message.WAKE)) == []
    assert t.answer_pull() == ["pull m x100"]  # the answer may be older than the signal


def test_budget_is_what_the_predicted_need_of_the_running_leaves() -> None:
    t = Transcript()
    t.serve()
    assert t.pull is not None
    assert t.pull.kv_tokens == CAPACITY
    reserve = t.pull.output_reserve_tokens
    assert reserve == 213  # the stated prior of a model without data
    t.answer_pull(pulled("1", prompt=300), pulled("2", prompt=50, output_max=10), head="m")
    assert t.pull.kv_tokens == CAPACITY - (300 + reserve) - (50 + 10)  # never more than a request may produce


def test_a_run_that_outgrows_its_reserve_takes_more() -> None:
    t = Transcript()
    t.serve()
    t.answer_pull(pulled("1", prompt=300, output_max=1000))
    t.produce(("1", 400))
    assert t.machine.runs.kv_reserved == 300 + 600
    t.produce(("1", 400))
    assert t.machine.runs.kv_reserved == 300 + 1000  # not beyond what it may produce


def test_expected_output_follows_what_ends() -> None:
    t = Transcript()
    t.serve()
    t.answer_pull(*(pulled(str(number)) for number in range(100)))
    for number in range(100):
        t.end(ended(str(number), 10))
    assert 10 < t.machine.expectations.output_tokens("m") < 60
    assert t.machine.expectations.output_tokens("n") == 213  # another model's is its own


def test_blocked_by_kv_until_enough_is_free() -> None:
    t = Transcript()
    t.serve()
    big = [pulled(str(number), prompt=4000) for number in (1, 2)]
    assert t.answer_pull(*big, head="m", blocked=4213) == ["start 1", "start 2"]  # 4,213 more do not fit
    assert t.produce(("1", 1)) == ["emit 1[0:1]"]
    assert t.end(ended("2", 3))[0] == "pull m x100"


def test_lookahead_pulls_beyond_the_batch() -> None:
    t = Transcript(batch_max=2, lookahead_requests=3)
    assert t.serve() == ["pull m x5"]
    starts = ["start 1", "start 2", "start 3", "start 4", "start 5"]
    assert t.answer_pull(*(pulled(str(number)) for number in range(1, 6)), head="m") == starts


def test_what_can_never_fit_fails_and_blocks_nobody() -> None:
    t = Transcript()
    t.serve()
    assert t.answer_pull(pulled("1", prompt=CAPACITY), pulled("2")) == ["start 2", "complete 1[0:0]=KV_CAPACITY_EXCEEDED"]


def test_an_unreadable_body_fails() -> None:
    t = Transcript()
    t.serve()
    assert t.answer_pull(pulled("1", refusal="cannot be read")) == ["complete 1[0:0]=ENGINE_FAILURE"]


def test_resumed_with_all_its_tokens_is_completed_without_the_engine() -> None:
    t = Transcript()
    t.serve()
    assert t.answer_pull(pulled("1", output_max=7, stored=7)) == ["complete 1[7:7]=LENGTH"]


def test_a_lost_pull_is_looked_up_before_the_next() -> None:
    t = Transcript()
    t.serve()
    assert t.lose("pull") == []
    assert t.wake() == ["read owned"]
    assert t.answer_owned(pulled("1"), pulled("2", stored=3)) == ["start 1", "start 2", "pull m x100"]
    assert t.answer_pull(pulled("1")) == []  # known


def test_a_late_pull_of_another_model_is_given_back() -> None:
    t = Transcript()
    t.serve()
    assert t.answer_pull(pulled("1", model="n"), head="m") == ["pull m x100", "give back 1 unstarted"]


def test_the_head_is_looked_at_even_when_the_batch_is_full() -> None:
    t = Transcript(batch_max=1)
    t.serve()
    t.answer_pull(pulled("1"), head="m")
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull nothing"]
    assert t.answer_pull(head="n") == ["load n warm"]


def test_what_is_owned_is_compared_now_and_then() -> None:
    t = Transcript(owned_check_s=15.0)
    t.serve()
    t.answer_pull()
    assert t.wake() == ["read owned"]
    assert t.now_s == 15.0
    assert t.answer_owned(pulled("9")) == ["start 9"]


def test_fewer_run_at_once_where_more_would_be_late() -> None:
    """Outputs of 213 tokens, due within 20 s, six a second and ten waiting: each of 100 at once would take 20 s, 0.9 ms a step for each of
    them."""
    hardware = {"m": replace(profile("m", recompute_us=0.0), decode_b_ms_per_seq=0.9, kv_capacity_tokens=1_000_000)}
    runs = [replace(pulled(str(number), prompt=10, due=20.0 + number / 10), slo_s=20.0, slo_class="32s") for number in range(40)]
    head = replace(group("m", prompt=10, waiting=10, due=24.0), slo_class="32s")
    patient = replace(waiting_groups("m")[0], slo_class="4096s", waiting=100, first_deadline_s=3_000.0)

    def limit(*, batch_by_slo: bool) -> int:
        t = Transcript(batch_by_slo=batch_by_slo, batch_max=256, hardware=hardware)
        t.serve()
        t.at(4.0).answer_pull(*runs, head=head)
        for second in range(5, 60):
            for run in runs[:6]:
                t.machine.batch_size.record_pull(run)
            t.machine.batch_size.choose(float(second), "m", replace(head, first_deadline_s=second + 12.0), [patient])
        return t.machine.batch_size.limit

    assert limit(batch_by_slo=True) < 100
    assert limit(batch_by_slo=False) == 256


def test_the_limit_bounds_a_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlm_agent.decisions.batch_size.BatchChoice.choose", lambda *demands, **settings: 60)
    t = Transcript(batch_by_slo=True, batch_max=256, hardware={"m": profile("m", recompute_us=0.0)})
    t.serve()
    t.at(4.0).answer_pull(*(pulled(str(number), prompt=10) for number in range(40)), head=group("m", prompt=10, waiting=30, due=24.0))
    assert t.pull is not None
    assert t.pull.requests_max == 20


def test_groups_of_other_models_count_as_those_that_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[float, int]]] = []

    def choose(*demands: object, others: list[tuple[float, int]], **settings: object) -> int:
        seen.append(others)
        return 60

    monkeypatch.setattr("qlm_agent.decisions.batch_size.BatchChoice.choose", choose)
    t = Transcript(batch_by_slo=True, batch_max=256, hardware={"m": profile("m", recompute_us=0.0)})
    t.serve()
    t.at(4.0).answer_pull(pulled("a", prompt=10), head=group("m", prompt=10, waiting=30, due=24.0), ahead=("n", "m", "o"))
    assert [count for _, count in seen[-1]] == [1, 1]


def test_runs_without_a_token_count_as_outstanding_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def choose(choice: object, hardware: object, demands: list[ClassDemand], **settings: object) -> int:
        seen.append(sum(each.prefilling for each in demands))
        return 60

    monkeypatch.setattr("qlm_agent.decisions.batch_size.BatchChoice.choose", choose)
    t = Transcript(batch_by_slo=True, batch_max=256, hardware={"m": profile("m", recompute_us=0.0)})
    t.serve()
    t.at(4.0).answer_pull(*(pulled(name, prompt=10) for name in "abc"), head="m")
    t.produce(("a", 1))
    t.machine.batch_size.choose(10.0, "m", None, ())
    t.produce(("b", 1), ("a", 1))
    t.machine.batch_size.choose(20.0, "m", None, ())
    assert seen[-2:] == [2, 1]


def test_groups_behind_the_head_are_read_once_a_second() -> None:
    t = Transcript()
    t.serve()
    behind_read = []
    for tenth in range(1, 31):
        t.at(0.1 * tenth).answer_pull(head="m")
        t.step(ControlMessage(message=Message.HEAD_CHANGED))
        assert t.pull is not None
        behind_read.append(t.pull.behind)
    assert sum(behind_read) in (2, 3)


def test_a_size_is_reported_once_it_is_another_by_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [100]
    monkeypatch.setattr("qlm_agent.decisions.batch_size.BatchChoice.choose", lambda *demands, **settings: chosen[-1])
    t = Transcript(batch_by_slo=True, batch_max=256, hardware=HARDWARE)
    t.serve()
    reported = []
    for size, model in ((100, "m"), (124, "m"), (81, "m"), (125, "m"), (101, "m"), (100, "m"), (99, "n")):
        chosen.append(size)
        t.machine.batch_size.choose(100.0 + 10.0 * len(chosen), model, None, ())
        reported.append(t.machine.batch_reported)
    assert reported == [100, 100, 100, 125, 125, 100, 99], "another model's is reported at once"


def test_first_tokens_wait_for_no_seat_that_slos_keep_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 of a class run where 30 may: its head waits, and a head whose SLO bounds the first token does not."""
    monkeypatch.setattr("qlm_agent.decisions.batch_size.BatchChoice.choose", lambda *demands, **settings: 30)
    hardware = {"m": profile("m", recompute_us=0.0)}
    runs = [replace(pulled(str(number), prompt=10, due=20.0 + number / 10), slo_s=20.0, slo_class="32s") for number in range(40)]
    head = replace(group("m", prompt=10, waiting=7, due=24.0), slo_class="32s")
    for first_token in (False, True):
        t = Transcript(batch_by_slo=True, batch_max=256, hardware=hardware)
        t.serve()
        lines = t.at(4.0).answer_pull(*runs, head=replace(head, first_token=first_token))
        assert [line for line in lines if line.startswith("pull")] == (["pull m x7"] if first_token else [])
