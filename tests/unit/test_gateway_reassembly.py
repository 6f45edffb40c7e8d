"""Streams put together under faults: whatever frames and answers are lost, doubled, late or out of order, every reader is given the
output exactly, in order, within its bounds (invariant 4 of the design; issue point 5)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from qlm.stream_position import ChunkFate, StreamPosition
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.streams.events import (
    Accepted,
    AcceptSent,
    Attach,
    AttachFailure,
    Closed,
    DeliverFrame,
    DeliverOutput,
    Effect,
    EndByFrame,
    EndByRecord,
    Event,
    Find,
    Forget,
    FrameFacts,
    FramesRead,
    Located,
    LocateFailed,
    Opened,
    ReaderKind,
    Refuse,
    Taken,
    Tick,
)
from qlm_gateway.streams.machine import GatewayMachine
from qlm_gateway.streams.readers import StreamLimits

KEY = RequestKey("default", "r")
HERE = "here"
BUFFER_MAX = 6
BUFFERS_MAX = 14
CHUNK_MAX = 4
READERS_MAX = 5
SETTLE_ROUNDS_MAX = 200
LIMITS = StreamLimits(
    buffer_tokens_max=BUFFER_MAX,
    buffers_tokens_max=BUFFERS_MAX,
    stall_s=3.0,
    poll_s=0.5,
    recheck_s=2.0,
    patience_s=1e9,
    locates_max=3,
    unclaimed_max=8,
)


@dataclass
class Reader:
    """Ranges of tokens that a reader received, those that it has not taken, and the client behind it."""

    start: int
    kind: ReaderKind
    position: StreamPosition
    got: list[int] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)
    forgotten: bool = False
    ended: bool = False
    closed: bool = False

    @property
    def unread(self) -> int:
        return sum(end - start for start, end in self.pending)


class Streams:
    """One request on a queue; its frames and the answers about it travel as slowly and as badly as a script says. Each `op_` takes a
    number that chooses among its cases; where it has nothing to do it does nothing."""

    def __init__(self) -> None:
        self.machine = GatewayMachine(HERE, LIMITS)
        self.now_s = 0.0
        self.produced = 0
        self.over = False
        self.bound_to = HERE
        self.network: list[FrameFacts] = []
        self.questions: list[Attach | Find] = []
        self.answers: list[Located | LocateFailed] = []
        self.readers: dict[int, Reader] = {}
        self.accepting = True
        self.offsets: dict[int, int] = {}
        self.readers[0] = Reader(0, ReaderKind.TOKENS, StreamPosition())
        self.step(AcceptSent(reader=0))

    # Events and effects of the machine

    def step(self, event: Event) -> None:
        self.now_s += 0.001
        for effect in self.machine.step(self.now_s, event):
            self.perform(effect, event)
        open_readers = [reader for reader in self.readers.values() if not reader.closed]
        assert self.machine.buffered_tokens == sum(reader.unread for reader in open_readers)
        beyond = sum(reader.pending[-1][1] - reader.pending[-1][0] for reader in open_readers if len(reader.pending) == 1)
        assert self.machine.buffered_tokens <= BUFFERS_MAX + beyond, "all buffers together are bounded"

    def perform(self, effect: Effect, event: Event) -> None:
        if isinstance(effect, (Attach, Find)):
            self.questions.append(effect)
            return
        reader = self.readers[effect.reader]
        assert not reader.closed
        if isinstance(effect, Forget):
            assert reader.pending, "only one that leaves what it was given is behind"
            reader.pending, reader.ended, reader.forgotten = [], False, True
            return
        assert not reader.ended, "given something after its end"
        assert not reader.forgotten, "given something before it wants more"
        match effect:
            case DeliverFrame(frame=facts, skip=skip, offset=offset):
                assert 0 <= skip < facts.count
                assert facts.offset + skip == offset
                self.give(reader, offset, facts.offset + facts.count)
            case DeliverOutput(skip=skip, offset=offset, count=count):
                assert isinstance(event, Located)
                assert self.offsets.pop(event.reader) + skip == offset
                assert count <= BUFFER_MAX
                assert offset + count <= event.produced
                self.give(reader, offset, offset + count)
            case EndByFrame():
                self.end(reader)
            case EndByRecord():
                self.end(reader)
            case Refuse():
                raise AssertionError(f"refused: {effect}")

    def give(self, reader: Reader, start: int, end: int) -> None:
        assert reader.kind is ReaderKind.TOKENS
        assert start < end
        reader.pending.append((start, end))
        assert reader.unread <= BUFFER_MAX or len(reader.pending) == 1, "the buffer is bounded"

    def end(self, reader: Reader) -> None:
        assert self.over
        reader.ended = True

    # Operations of the world

    def op_produce(self, choice: int) -> None:
        if not self.over:
            count = choice % CHUNK_MAX + 1
            self.send(FrameFacts(queue_id="1-0", offset=self.produced, count=count))
            self.produced += count

    def op_another_attempt_repeats_some(self, choice: int) -> None:
        """A requeued request goes on from its stored output; the frame of a part that was stored before may overlap."""
        if not self.over and self.produced:
            offset = max(0, self.produced - choice)
            self.produced += 1
            self.send(FrameFacts(queue_id="1-0", offset=offset, count=self.produced - offset))

    def op_finish(self, choice: int) -> None:
        if choice == 0 and not self.over:
            self.finish(choice % CHUNK_MAX, completed=self.produced % 2 == 0)

    def finish(self, count: int, *, completed: bool) -> None:
        offset = self.produced
        self.produced += count
        self.over = True
        if completed:
            self.send(FrameFacts(queue_id="1-0", offset=offset, count=count, last=True, total=self.produced))
        else:
            self.send(FrameFacts(queue_id="1-0", offset=0, count=0, last=True))

    def send(self, frame: FrameFacts) -> None:
        if self.bound_to == HERE:
            self.network.append(frame)

    def op_another_gateway_takes_it(self, choice: int) -> None:
        if choice < 2 and not self.over:
            self.bound_to = "elsewhere"

    def op_frames_arrive(self, choice: int) -> None:
        arrived, self.network = self.network[: choice + 1], self.network[choice + 1 :]
        if arrived:
            self.step(FramesRead(frames=arrived))

    def op_frame_is_lost_or_doubled_or_late(self, choice: int) -> None:
        if self.network:
            index = choice % len(self.network)
            frame = self.network[index] if choice % 3 == 0 else self.network.pop(index)
            if choice % 3 != 1:
                self.network.append(frame)

    def op_accept_is_answered(self, choice: int) -> None:
        if self.accepting:
            self.accepting = False
            self.step(Accepted(reader=0, key=KEY, queue_id="1-0"))

    def op_open_reader(self, choice: int) -> None:
        if len(self.readers) < READERS_MAX:
            kind = ReaderKind.END if choice == 0 else ReaderKind.TOKENS
            start = min(choice, self.produced) if kind is ReaderKind.TOKENS else 0
            name = len(self.readers)
            self.readers[name] = Reader(start, kind, StreamPosition(start))
            self.step(Opened(reader=name, kind=kind, key=KEY, offset=start))

    def op_queue_answers(self, choice: int) -> None:
        """At one moment; the answer arrives at a later one."""
        if self.questions:
            self.answers.append(self.answer(self.questions.pop(choice % len(self.questions)), fails=choice == 7))

    def answer(self, question: Attach | Find, *, fails: bool) -> Located | LocateFailed:
        known = self.machine._readers.get(question.reader)
        if fails and known is not None and known.queue_id:
            return LocateFailed(reader=question.reader, failure=AttachFailure.UNAVAILABLE)
        if isinstance(question, Attach) and question.bind and not self.over:
            self.bound_to = HERE
        gateway = "" if self.over else self.bound_to
        produced = 0
        if isinstance(question, Attach):
            produced = self.produced
            self.offsets[question.reader] = question.offset  # one question of a reader at a time
        return Located(reader=question.reader, queue_id="1-0", ended=self.over, gateway=gateway, produced=produced)

    def op_answer_arrives(self, choice: int) -> None:
        if self.answers:
            self.step(self.answers.pop(choice % len(self.answers)))

    def op_reader_takes(self, choice: int) -> None:
        self.take(choice % len(self.readers), parts_max=choice // 2 + 1)

    def take(self, name: int, parts_max: int) -> None:
        reader = self.readers[name]
        parts, reader.pending = reader.pending[:parts_max], reader.pending[parts_max:]
        for start, end in parts:
            assert reader.position.on_chunk(start, end - start) is ChunkFate.TAKE
            reader.got.extend(range(start, end))
        wants, reader.forgotten = bool(parts) or reader.forgotten, False
        if wants and not reader.closed:
            self.step(Taken(reader=name, offset=reader.position.next))

    def op_reader_leaves(self, choice: int) -> None:
        if 2 < choice < len(self.readers):
            self.readers[choice].closed = True
            self.step(Closed(reader=choice))

    def op_time_passes(self, choice: int) -> None:
        self.now_s += 0.4 * choice
        self.step(Tick())

    def settle(self) -> None:
        """The faults end, the request ends, and everybody gets everything."""
        self.op_accept_is_answered(0)
        if not self.over:
            self.finish(0, completed=True)
        for _ in range(SETTLE_ROUNDS_MAX):
            while self.network:
                self.op_frames_arrive(0)
            while self.answers:
                self.op_answer_arrives(0)
            while self.questions:
                self.op_queue_answers(0)
                self.op_answer_arrives(0)
            for name in self.readers:
                self.take(name, parts_max=BUFFER_MAX)
            if all(reader.closed or (reader.ended and not reader.pending) for reader in self.readers.values()):
                break
            self.now_s += 1.0
            self.step(Tick())
        for name, reader in self.readers.items():
            assert reader.ended or reader.closed, "a reader never heard of the end"
            if reader.kind is ReaderKind.TOKENS and not reader.closed:
                assert reader.got == list(range(reader.start, self.produced))
            reader.closed = True
            self.step(Closed(reader=name))
        assert self.machine.reader_count == 0
        assert self.machine.buffered_tokens == 0


OPERATIONS = sorted(name for name in vars(Streams) if name.startswith("op_"))


@settings(max_examples=150)
@given(script=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 7)), min_size=80, max_size=160))
def test_every_reader_is_given_the_output_exactly_and_in_order(script: list[tuple[str, int]]) -> None:
    streams = Streams()
    for operation, choice in script:
        getattr(streams, operation)(choice)
    streams.settle()
