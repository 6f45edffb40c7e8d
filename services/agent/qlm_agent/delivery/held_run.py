"""The shell's state of a run: its request, its times, and its whole output, from which any part can be sent again."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.context import Context

from qlm.api.v1.request_pb2 import LengthGuess, Result
from qlm_agent.delivery.frames import output_piece, piece_frame, token_frame
from qlm_agent.delivery.logprobs import record_bytes
from qlm_agent.engines.port import EngineOutput, EngineRequest
from qlm_core.vocabulary.request import Slo
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES
from qlm_queue.values import Emission, Owned, Pulled


def run_id_of(queue_id: str, attempt: int) -> str:
    """The name of one attempt."""
    return f"{queue_id}/{attempt}"


class HeldOutput:
    """The output of a request so far, earlier attempts included, in tokens (or pieces) and in the bytes of progress."""

    def __init__(self, progress: bytes, *, text: bool, logprobs: bytes = b"", top: int | None = None) -> None:
        """`top`: how many likeliest tokens each token's record of `logprobs` names; None where there are no records."""
        self.text = text
        self._bytes = bytearray(progress)
        self._logprobs = bytearray(logprobs)
        self._record_bytes = record_bytes(top)
        self._pieces: list[str] = []
        self._ends: list[int] = [0]  # bytes of progress after so many pieces
        if text:
            self._bytes.clear()
            self._add_pieces(tuple(Result.FromString(progress).output_pieces))

    def __len__(self) -> int:
        return len(self._pieces) if self.text else len(self._bytes) // TOKEN_BYTES

    @property
    def whole(self) -> bool:
        """Each token has its log probabilities, or none has."""
        return len(self._logprobs) == self._record_bytes * len(self)

    @property
    def token_ids(self) -> bytes:
        return b"" if self.text else bytes(self._bytes)

    @property
    def pieces(self) -> tuple[str, ...]:
        return tuple(self._pieces)

    def add(self, output: EngineOutput) -> int:
        """Takes new output; returns how many tokens or pieces it was."""
        if self.text:
            self._add_pieces(output.pieces)
            return len(output.pieces)
        self._bytes += output.token_ids
        self._logprobs += output.logprobs
        return len(output.token_ids) // TOKEN_BYTES

    def part(self, start: int, end: int) -> tuple[int, bytes]:
        """Offset and bytes of progress of tokens `start` to `end`."""
        if self.text:
            return self._ends[start], bytes(self._bytes[self._ends[start] : self._ends[end]])
        return start * TOKEN_BYTES, bytes(self._bytes[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def logprobs(self, start: int, end: int) -> bytes:
        """Records of tokens `start` to `end`; empty if not requested."""
        return bytes(self._logprobs[start * self._record_bytes : end * self._record_bytes])

    def frame(self, prefix: bytes, start: int, end: int) -> bytes:
        """The serialized frame of tokens `start` to `end`."""
        if self.text:
            return piece_frame(prefix, start, self._pieces[start:end])
        token_ids = bytes(self._bytes[start * TOKEN_BYTES : end * TOKEN_BYTES])
        return token_frame(prefix, start, token_ids) + self.logprobs(start, end)

    def _add_pieces(self, pieces: tuple[str, ...]) -> None:
        for piece in pieces:
            self._bytes += output_piece(piece)
            self._pieces.append(piece)
            self._ends.append(len(self._bytes))


@dataclass(slots=True, eq=False, kw_only=True)
class HeldRun:
    """One owned request, mutable. Times in seconds of the queue's clock, 0 until they are known. `request` is None where the body cannot be
    read, and `refusal` says why."""

    run_id: str
    pulled: Pulled
    request: EngineRequest | None
    refusal: str
    model: str
    prompt_tokens: int
    output_tokens_max: int
    slo_class: str
    trace: Context | None  # None for a request whose trace is not kept
    output: HeldOutput
    prefix: bytes
    pulled_s: float
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    paused_s: float = 0.0  # see EngineOutput
    cached_tokens: int | None = None  # see EngineOutput
    taken_off_s: float = 0.0  # when the agent took it off the engine
    slo: Slo | None = None
    length_guess: LengthGuess | None = None  # as the gateway stored it

    @property
    def owned(self) -> Owned:
        return Owned(queue_id=self.pulled.queue_id, key=self.pulled.key, attempt=self.pulled.attempt)

    def emission(self, start: int, end: int) -> Emission:
        """Tokens `start` to `end`; an empty part has no frame."""
        offset, progress = self.output.part(start, end)
        return Emission(
            queue_id=self.pulled.queue_id,
            key=self.pulled.key,
            attempt=self.pulled.attempt,
            offset=offset,
            progress=progress,
            frame=self.output.frame(self.prefix, start, end) if end > start else b"",
            text=self.output.text,
            logprobs=self.output.logprobs(start, end),
        )
