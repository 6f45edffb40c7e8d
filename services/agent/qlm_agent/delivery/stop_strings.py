"""Stop strings, found on this side of an engine: output ends before one, and nothing of it is ever told.

What may be the beginning of a stop string is held back until that is decided. So an interrupted answer was told without such a beginning,
and the attempt that goes on makes it again and finds a stop string that lies across the seam. Where several lie over each other the one
that is whole first ends the output, whatever portions it comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """What an engine made at once: text, and its token ids where it tells them. No text: the beginning of a character."""

    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A stop string begins after `at` characters of the text of `last`, which is told up to there."""

    last: Piece
    at: int


class StopStrings:
    """The stop strings of one run: at least one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held: list[Piece] = []
        self._text = ""  # of what is held

    def feed(self, piece: Piece) -> tuple[list[Piece], Found | None]:
        """What may be told now, and the stop string, after which nothing may be fed."""
        self._held.append(piece)
        self._text += piece.text
        ends = [(start + len(each), start) for each in self._stop if (start := self._text.find(each)) >= 0]
        at = min(ends)[1] if ends else None
        told = self._release(self._undecided_at() if at is None else at)
        if at is None:
            return told, None
        at -= sum(len(each.text) for each in told)
        return told, Found(Piece(self._text, tuple(token for each in self._held for token in each.token_ids)), at)

    def flush(self) -> list[Piece]:
        """All that is held, where the run ends otherwise."""
        held, self._held, self._text = self._held, [], ""
        return held

    def _undecided_at(self) -> int:
        """Where the longest beginning of a stop string at the end of the text starts."""
        text = self._text
        for at in range(max(0, len(text) - max(map(len, self._stop)) + 1), len(text)):
            if any(each.startswith(text[at:]) for each in self._stop):
                return at
        return len(text)

    def _release(self, until: int) -> list[Piece]:
        """Takes what ends at or before a place of the text. What has no text yet is the beginning of a character: it goes with the rest."""
        end = count = 0
        for number, made in enumerate(self._held, start=1):
            end += len(made.text)
            if end > until:
                break
            if made.text:
                count = number
        told, self._held = self._held[:count], self._held[count:]
        self._text = self._text[sum(len(each.text) for each in told) :]
        return told


class TokenStops:
    """The end of one run. `text_of`: what a token adds to the text, None while a character is not complete."""

    def __init__(self, stop: Sequence[str], text_of: Callable[[int], str | None]) -> None:
        self._strings = StopStrings(stop)
        self._text_of = text_of

    def feed(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens that may be told now, and whether a stop string was found; nothing may be fed after that."""
        told: list[int] = []
        for token in tokens:
            pieces, found = self._strings.feed(Piece(self._text_of(token) or "", (token,)))
            told += _tokens(pieces)
            if found is not None:
                return told, True
        return told, False

    def flush(self) -> list[int]:
        """All that is held, where the run ends otherwise."""
        return _tokens(self._strings.flush())


def _tokens(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]
