"""The gateway's decisions about its readers, as transcripts: events in, effects out."""

from __future__ import annotations

import pytest

from gateway_transcripts import KEY, frame, frames, located, machine, opened, run, streaming
from qlm_core.vocabulary.errors import GatewayFull, Unavailable
from qlm_gateway.streams.events import (
    Accepted,
    AcceptSent,
    Attach,
    AttachFailure,
    Closed,
    DeliverFrame,
    DeliverOutput,
    DrainStarted,
    Effect,
    EndByFrame,
    EndByRecord,
    Find,
    Forget,
    FrameFacts,
    Located,
    LocateFailed,
    Opened,
    ReaderKind,
    Refusal,
    Refuse,
    Taken,
    Tick,
)
from qlm_gateway.streams.readers import PIECE_TOKENS, StreamLimits


def test_an_accepted_request_streams_without_asking_the_queue() -> None:
    gateway = streaming()
    assert run(gateway, (1.0, frames(frame(0, 2)))) == [DeliverFrame(reader=1, frame=frame(0, 2), skip=0, offset=0)]
    end = frame(3, 1, last=True, total=4)
    assert run(gateway, (1.1, frames(frame(2, 1), end))) == [
        DeliverFrame(reader=1, frame=frame(2, 1), skip=0, offset=2),
        DeliverFrame(reader=1, frame=end, skip=0, offset=3),
        EndByFrame(reader=1, frame=end),
    ]
    run(gateway, (1.2, Taken(reader=1, offset=4)), (1.3, Closed(reader=1)))
    assert gateway.reader_count == gateway.buffered_tokens == 0


def test_a_repeated_frame_is_dropped_and_an_overlapping_one_is_cut() -> None:
    gateway = streaming()
    run(gateway, (1.0, frames(frame(0, 3))))
    assert run(gateway, (1.1, frames(frame(0, 3), frame(1, 2)))) == []
    assert run(gateway, (1.2, frames(frame(1, 4)))) == [DeliverFrame(reader=1, frame=frame(1, 4), skip=2, offset=3)]


def test_a_gap_attaches_again_without_taking_the_request() -> None:
    gateway = streaming()
    run(gateway, (1.0, frames(frame(0, 2))))
    assert run(gateway, (1.1, frames(frame(5, 1)))) == [Attach(reader=1, key=KEY, bind=False, offset=2)]
    assert gateway.gaps == 1
    # A frame before the answer does not follow either, and attaches nothing more.
    assert run(gateway, (1.2, frames(frame(6, 1)))) == []
    assert run(gateway, (1.3, located(produced=7))) == [DeliverOutput(reader=1, skip=0, offset=2, count=5)]
    assert run(gateway, (1.4, frames(frame(7, 1)))) == [DeliverFrame(reader=1, frame=frame(7, 1), skip=0, offset=7)]


def test_an_answer_that_is_older_than_a_frame_that_passed_is_not_enough() -> None:
    gateway = streaming()
    run(gateway, (1.0, frames(frame(2, 2))))  # a gap: asks
    run(gateway, (1.1, frames(frame(4, 2))))  # passes by
    assert run(gateway, (1.2, located(produced=4))) == [
        DeliverOutput(reader=1, skip=0, offset=0, count=4),
        Attach(reader=1, key=KEY, bind=False, offset=4),
    ]
    assert run(gateway, (1.3, located(produced=6))) == [DeliverOutput(reader=1, skip=0, offset=4, count=2)]


def test_a_frame_that_follows_is_delivered_while_an_answer_is_awaited_and_cut_from_it() -> None:
    gateway = opened(offset=2)
    run(gateway, (0.1, located(produced=2)))
    run(gateway, (4.0, Tick()))  # silence: asks
    assert run(gateway, (4.1, frames(frame(2, 3)))) == [DeliverFrame(reader=1, frame=frame(2, 3), skip=0, offset=2)]
    assert run(gateway, (4.2, located(produced=6))) == [DeliverOutput(reader=1, skip=3, offset=5, count=1)]


def test_opening_binds_the_request_once() -> None:
    gateway = machine()
    opening = Opened(reader=1, kind=ReaderKind.TOKENS, key=KEY, offset=3)
    assert run(gateway, (0.0, opening)) == [Attach(reader=1, key=KEY, bind=True, offset=3)]
    assert run(gateway, (0.1, located(produced=5))) == [DeliverOutput(reader=1, skip=0, offset=3, count=2)]
    assert run(gateway, (0.2, frames(frame(9, 1)))) == [Attach(reader=1, key=KEY, bind=False, offset=5)]


def test_frames_that_outrun_the_answer_of_an_attach_follow_its_output() -> None:
    gateway = opened()
    last = frame(2, 2, last=True, total=4)
    assert run(gateway, (0.1, frames(frame(0, 2), last, last))) == []
    assert run(gateway, (0.2, located(produced=1))) == [
        DeliverOutput(reader=1, skip=0, offset=0, count=1),
        DeliverFrame(reader=1, frame=frame(0, 2), skip=1, offset=1),
        DeliverFrame(reader=1, frame=last, skip=0, offset=2),
        EndByFrame(reader=1, frame=last),
    ]


def accepting(*facts: FrameFacts, unclaimed_max: int = 100) -> list[Effect]:
    """The effects of the answer of an accept, before which frames were read, an entry each."""
    gateway = machine(StreamLimits(unclaimed_max=unclaimed_max, buffer_tokens_max=10))
    run(gateway, (0.0, AcceptSent(reader=1)), *((0.1, frames(each)) for each in facts))
    return run(gateway, (0.2, Accepted(reader=1, key=KEY, queue_id="1-0")))


def test_frames_that_outrun_the_answer_of_an_accept_are_given_with_it_in_order() -> None:
    other, second, last = frame(0, 1, queue_id="2-0"), frame(2, 1), frame(3, 0, last=True, total=3)
    assert accepting(frame(0, 2), other, second, second, last) == [
        DeliverFrame(reader=1, frame=frame(0, 2), skip=0, offset=0),
        DeliverFrame(reader=1, frame=second, skip=0, offset=2),
        EndByFrame(reader=1, frame=last),
    ]


def test_a_gap_or_a_full_buffer_among_them_asks_the_queue() -> None:
    given = DeliverFrame(reader=1, frame=frame(0, 2), skip=0, offset=0)
    assert accepting(frame(0, 2), frame(5, 1)) == [given, Attach(reader=1, key=KEY, bind=False, offset=2)]
    assert accepting(frame(0, 2), frame(2, 9), frame(11, 1)) == [given, Forget(reader=1)]


def test_at_the_bound_frames_of_the_request_kept_longest_are_dropped() -> None:
    first, others = frame(0, 1), [frame(0, 1, queue_id=f"{number}-0") for number in (2, 3)]
    assert accepting(first, *others, unclaimed_max=3) == [DeliverFrame(reader=1, frame=first, skip=0, offset=0)]
    assert accepting(first, *others, unclaimed_max=2) == []
    assert accepting(first, *others, frame(1, 1), unclaimed_max=2) == [Attach(reader=1, key=KEY, bind=False, offset=0)]


def test_frames_of_unknown_requests_are_forgotten_when_nobody_waits() -> None:
    gateway = machine()
    run(gateway, (0.0, AcceptSent(reader=1)), (0.0, AcceptSent(reader=2)))
    run(gateway, (0.1, frames(frame(0, 2))), (0.2, Closed(reader=1)))
    assert gateway._following.unclaimed
    run(gateway, (0.3, Closed(reader=2)))
    assert not gateway._following.unclaimed
    run(gateway, (0.4, frames(frame(2, 2))))
    assert not gateway._following.unclaimed


def test_a_request_that_another_gateway_took_before_the_answer_gives_its_frames_and_is_found_again() -> None:
    gateway = machine()
    run(gateway, (0.0, AcceptSent(reader=1)), (0.1, frames(frame(0, 2))))
    given = [DeliverFrame(reader=1, frame=frame(0, 2), skip=0, offset=0)]
    assert run(gateway, (0.2, Accepted(reader=1, key=KEY, queue_id="1-0"))) == given
    assert run(gateway, (3.3, Tick())) == [Attach(reader=1, key=KEY, bind=False, offset=2)]  # its frames go elsewhere
    assert run(gateway, (3.4, located(produced=5, gateway="other"))) == [DeliverOutput(reader=1, skip=0, offset=2, count=3)]


def test_a_request_that_has_ended_gives_its_output_and_its_record() -> None:
    assert run(opened(), (0.1, located(produced=4, ended=True, gateway=""))) == [
        DeliverOutput(reader=1, skip=0, offset=0, count=4),
        EndByRecord(reader=1),
    ]
    assert run(opened(offset=4), (0.1, located(produced=4, ended=True, gateway=""))) == [EndByRecord(reader=1)]


@pytest.mark.parametrize("last", [frame(0, 0, last=True), frame(2, 0, last=True), frame(2, 1, last=True)])
def test_a_last_frame_that_does_not_say_all_reads_the_record(last: FrameFacts) -> None:
    gateway = streaming()
    run(gateway, (1.0, frames(frame(0, 2))))
    effect = run(gateway, (1.1, frames(last)))[-1]
    assert effect == Attach(reader=1, key=KEY, bind=False, offset=2 + last.count)
    assert run(gateway, (1.2, located(produced=2 + last.count, ended=True, gateway=""))) == [EndByRecord(reader=1)]


def test_a_slow_reader_falls_behind_and_attaches_again_where_it_stands_when_it_wants_more() -> None:
    gateway = streaming()
    run(gateway, (1.0, frames(frame(0, 3))), (1.0, Taken(reader=1, offset=3)), (1.0, frames(frame(3, 6))))
    assert run(gateway, (1.1, frames(frame(9, 6)))) == [Forget(reader=1)]
    assert (gateway.overruns, gateway.buffered_tokens) == (1, 0)
    assert run(gateway, (1.2, frames(frame(15, 1, last=True, total=16)))) == []
    assert run(gateway, (9.0, Tick())) == []  # no look while it is behind: it could not be given anything
    assert run(gateway, (9.1, Taken(reader=1, offset=3))) == [Attach(reader=1, key=KEY, bind=False, offset=3)]
    # More than its buffer holds arrives in several answers.
    record = located(produced=16, ended=True, gateway="")
    assert run(gateway, (9.2, record)) == [DeliverOutput(reader=1, skip=0, offset=3, count=10)]
    assert run(gateway, (9.3, Taken(reader=1, offset=9))) == []
    assert run(gateway, (9.4, Taken(reader=1, offset=13))) == [Attach(reader=1, key=KEY, bind=False, offset=13)]
    assert run(gateway, (9.5, record)) == [DeliverOutput(reader=1, skip=0, offset=13, count=3), EndByRecord(reader=1)]


def test_an_answer_for_a_reader_that_fell_behind_meanwhile_is_not_enough() -> None:
    gateway = opened()
    run(gateway, (0.1, located(produced=2)), (4.0, Tick()))  # silence: asks from 2
    assert run(gateway, (4.1, frames(frame(2, 6)))) == [DeliverFrame(reader=1, frame=frame(2, 6), skip=0, offset=2)]
    assert run(gateway, (4.2, frames(frame(8, 6)))) == [Forget(reader=1)]
    assert run(gateway, (4.3, Taken(reader=1, offset=0))) == []  # the answer is awaited still
    assert run(gateway, (4.4, located(produced=9))) == [Attach(reader=1, key=KEY, bind=False, offset=0)]
    assert run(gateway, (4.5, located(produced=9))) == [
        DeliverOutput(reader=1, skip=0, offset=0, count=9),
        Attach(reader=1, key=KEY, bind=False, offset=9),  # a frame up to 14 arrived
    ]


def test_what_a_reader_leaves_is_forgotten_after_a_while_also_when_its_request_has_ended() -> None:
    gateway = streaming()
    run(gateway, (1.0, frames(frame(0, 4), frame(4, 0, last=True, total=4))))
    assert run(gateway, (6.9, Tick())) == []
    assert run(gateway, (7.0, Tick())) == [Forget(reader=1)]
    assert gateway.buffered_tokens == 0
    assert run(gateway, (8.0, Tick())) == []
    assert run(gateway, (9.0, Taken(reader=1, offset=0))) == [Attach(reader=1, key=KEY, bind=False, offset=0)]
    assert run(gateway, (9.1, located(produced=4, ended=True, gateway=""))) == [
        DeliverOutput(reader=1, skip=0, offset=0, count=4),
        EndByRecord(reader=1),
    ]


def test_all_buffers_together_are_bounded_and_an_empty_one_takes_a_frame_nevertheless() -> None:
    gateway = machine(StreamLimits(buffer_tokens_max=10, buffers_tokens_max=12))
    for reader in (1, 2, 3):
        run(gateway, (0.0, AcceptSent(reader=reader)), (0.1, Accepted(reader=reader, key=KEY, queue_id=f"{reader}-0")))
    run(gateway, (1.0, frames(frame(0, 8, queue_id="1-0"), frame(0, 4, queue_id="2-0"))))
    assert run(gateway, (1.1, frames(frame(0, 2, queue_id="3-0")))) == [
        DeliverFrame(reader=3, frame=frame(0, 2, queue_id="3-0"), skip=0, offset=0)
    ]
    assert run(gateway, (1.2, frames(frame(8, 1, queue_id="1-0")))) == [Forget(reader=1)]
    assert run(gateway, (1.3, frames(frame(4, 6, queue_id="2-0")))) == [
        DeliverFrame(reader=2, frame=frame(4, 6, queue_id="2-0"), skip=0, offset=4)
    ]
    assert gateway.buffered_tokens == 12


def test_stored_output_comes_in_pieces_where_all_buffers_together_are_full() -> None:
    gateway = machine(StreamLimits(buffer_tokens_max=1_000, buffers_tokens_max=1_000))
    run(gateway, (0.0, Opened(reader=1, kind=ReaderKind.TOKENS, key=KEY)), (0.1, located(produced=5_000)))
    assert gateway.buffered_tokens == 1_000
    run(gateway, (0.2, Opened(reader=2, kind=ReaderKind.TOKENS, key=KEY)))
    given = run(gateway, (0.3, located(produced=5_000, reader=2)))
    assert given == [DeliverOutput(reader=2, skip=0, offset=0, count=PIECE_TOKENS)]
    assert run(gateway, (0.4, Taken(reader=2, offset=PIECE_TOKENS))) == [Attach(reader=2, key=KEY, bind=False, offset=PIECE_TOKENS)]


def test_readers_are_bounded_and_those_that_are_accepted_count() -> None:
    gateway = machine(StreamLimits(readers_max=2))
    run(gateway, (0.0, AcceptSent(reader=1)), (0.1, Opened(reader=2, kind=ReaderKind.END, key=KEY)))
    gateway.check_open()
    with pytest.raises(GatewayFull) as full:
        gateway.check_room()
    assert (full.value.reason, full.value.details["limit"]) == ("STREAMS_FULL", "2")
    assert full.value.retry_after_s == pytest.approx(0.5)
    run(gateway, (0.2, Closed(reader=1)))
    gateway.check_room()


def test_a_chunk_larger_than_the_buffer_fits_into_an_empty_one() -> None:
    assert run(streaming(), (1.0, frames(frame(0, 50)))) == [DeliverFrame(reader=1, frame=frame(0, 50), skip=0, offset=0)]


def test_a_reader_whose_request_moved_to_another_gateway_attaches_without_taking_it_back() -> None:
    gateway = opened()
    run(gateway, (0.1, located(produced=1)))
    assert run(gateway, (3.0, Tick())) == []
    assert run(gateway, (3.2, Tick())) == [Attach(reader=1, key=KEY, bind=False, offset=1)]
    assert run(gateway, (3.3, located(produced=3, gateway="other"))) == [DeliverOutput(reader=1, skip=0, offset=1, count=2)]
    assert run(gateway, (3.5, Tick())) == []
    assert run(gateway, (3.9, Tick())) == [Attach(reader=1, key=KEY, bind=False, offset=3)]
    assert run(gateway, (4.0, located(produced=3, ended=True, gateway=""))) == [EndByRecord(reader=1)]


def test_several_readers_of_one_request_each_from_its_offset() -> None:
    gateway = streaming()
    run(gateway, (1.0, frames(frame(0, 2))))
    run(gateway, (1.1, Opened(reader=2, kind=ReaderKind.TOKENS, key=KEY, offset=1)), (1.2, located(reader=2, produced=2)))
    run(gateway, (1.3, Opened(reader=3, kind=ReaderKind.END, key=KEY)), (1.4, located(reader=3)))
    last = frame(2, 1, last=True, total=3)
    assert run(gateway, (1.5, frames(last))) == [
        DeliverFrame(reader=1, frame=last, skip=0, offset=2),
        EndByFrame(reader=1, frame=last),
        DeliverFrame(reader=2, frame=last, skip=0, offset=2),
        EndByFrame(reader=2, frame=last),
        Find(reader=3, key=KEY),
    ]
    assert run(gateway, (1.6, located(reader=3, ended=True, gateway=""))) == [EndByRecord(reader=3)]


def test_who_waits_for_the_end_takes_a_request_that_nobody_follows_and_no_other() -> None:
    gateway = opened(kind=ReaderKind.END)
    assert run(gateway, (0.1, located(gateway=""))) == [Attach(reader=1, key=KEY, bind=True, offset=0)]
    assert run(gateway, (0.2, located(gateway="g"))) == []
    assert run(gateway, (0.3, frames(frame(0, 5)))) == []
    assert run(gateway, (0.4, frames(frame(5, 0, last=True, total=5)))) == [Find(reader=1, key=KEY)]
    late = opened(kind=ReaderKind.END)
    run(late, (0.1, located(gateway="")))
    # It ended before it was taken: the next answer has the record.
    assert run(late, (0.2, located(ended=True, gateway=""))) == [Find(reader=1, key=KEY)]
    assert run(late, (0.3, located(ended=True, gateway=""))) == [EndByRecord(reader=1)]
    elsewhere = opened(kind=ReaderKind.END)
    assert run(elsewhere, (0.1, located(gateway="other"))) == []
    assert run(elsewhere, (0.7, Tick())) == [Find(reader=1, key=KEY)]


def test_a_new_reader_is_refused_where_the_queue_is_away_and_an_open_one_is_patient() -> None:
    away = LocateFailed(reader=1, failure=AttachFailure.UNAVAILABLE)
    assert run(opened(), (0.1, away)) == [Refuse(reader=1, refusal=Refusal.QUEUE_UNAVAILABLE)]
    gateway = streaming()
    run(gateway, (1.0, frames(frame(3, 1))))
    assert run(gateway, (1.1, away)) == []
    assert run(gateway, (1.15, Tick())) == []
    assert run(gateway, (1.25, Tick())) == [Attach(reader=1, key=KEY, bind=False, offset=0)]
    assert run(gateway, (1.3, away)) == []
    assert run(gateway, (1.45, Tick())) == []  # twice as long
    assert run(gateway, (1.55, Tick())) == [Attach(reader=1, key=KEY, bind=False, offset=0)]
    assert run(gateway, (11.2, away)) == [Refuse(reader=1, refusal=Refusal.QUEUE_UNAVAILABLE)]
    assert run(gateway, (11.3, frames(frame(0, 4))), (20.0, Tick())) == []


@pytest.mark.parametrize(
    ("failure", "refusal"),
    [
        (AttachFailure.UNKNOWN_REQUEST, Refusal.UNKNOWN_REQUEST),
        (AttachFailure.OFFSET_OUT_OF_RANGE, Refusal.OFFSET_OUT_OF_RANGE),
        (AttachFailure.UNREADABLE, Refusal.UNREADABLE),
    ],
)
def test_what_the_queue_refuses_ends_the_reader(failure: AttachFailure, refusal: Refusal) -> None:
    assert run(opened(), (0.1, LocateFailed(reader=1, failure=failure))) == [Refuse(reader=1, refusal=refusal)]


def test_a_request_that_was_there_and_is_not_was_erased() -> None:
    gateway = opened()
    run(gateway, (0.1, located()), (4.0, Tick()))
    failed = LocateFailed(reader=1, failure=AttachFailure.UNKNOWN_REQUEST)
    assert run(gateway, (4.1, failed)) == [Refuse(reader=1, refusal=Refusal.ERASED)]


def test_questions_to_the_queue_are_bounded_and_sent_in_turn() -> None:
    gateway = machine(StreamLimits(locates_max=2))
    effects = [effect for reader in range(5) for effect in run(gateway, (0.0, Opened(reader=reader, kind=ReaderKind.TOKENS, key=KEY)))]
    assert [effect.reader for effect in effects] == [0, 1]
    run(gateway, (0.1, Closed(reader=2)))  # gone before its turn
    assert run(gateway, (0.2, located(reader=0))) == [Attach(reader=3, key=KEY, bind=True, offset=0)]
    assert run(gateway, (0.3, LocateFailed(reader=1, failure=AttachFailure.UNAVAILABLE)))[0] == Attach(
        reader=4, key=KEY, bind=True, offset=0
    )


def test_silent_readers_are_looked_at_in_turn_and_a_few_at_a_time() -> None:
    gateway = machine(StreamLimits(recheck_s=3.0, polls_per_tick_max=2))
    for reader in range(5):
        run(gateway, (0.0, AcceptSent(reader=reader)), (0.0, Accepted(reader=reader, key=KEY, queue_id=f"{reader}-0")))
    looked = [[effect.reader for effect in run(gateway, (4.0 + tick / 10, Tick()))] for tick in range(4)]
    assert looked == [[0, 1], [2, 3], [4], []]
    for reader in range(5):
        run(gateway, (5.0, Located(reader=reader, queue_id=f"{reader}-0", ended=False, gateway="g")))
    assert run(gateway, (7.9, Tick())) == []
    again = [effect.reader for tick in range(3) for effect in run(gateway, (8.1 + tick / 10, Tick()))]
    assert sorted(again) == [0, 1, 2, 3, 4]


def test_draining_refuses_what_is_new_at_once_and_what_is_open_after_the_grace() -> None:
    gateway = streaming()
    gateway.check_open()
    run(gateway, (1.0, DrainStarted(grace_s=5.0)))
    with pytest.raises(Unavailable) as refused:
        gateway.check_open()
    assert refused.value.reason == "DRAINING"
    assert refused.value.retry_after_s == pytest.approx(0.1)
    assert run(gateway, (5.9, frames(frame(0, 1)))) == [DeliverFrame(reader=1, frame=frame(0, 1), skip=0, offset=0)]
    assert run(gateway, (6.0, Tick())) == [Refuse(reader=1, refusal=Refusal.DRAINING)]
    assert run(gateway, (6.1, Tick())) == []


def test_an_accept_that_failed_or_was_left_opens_nothing() -> None:
    gateway = machine()
    run(gateway, (0.0, AcceptSent(reader=1)), (0.1, Closed(reader=1)))
    assert run(gateway, (0.2, Accepted(reader=1, key=KEY, queue_id="1-0"))) == []
    assert gateway.reader_count == 0
