"""Stop strings, matched by the agent: output ends before one, and no part of it is ever sent.

A possible beginning of a stop string is held until it is decided. So the output of an interrupted attempt lacks it, and the next attempt
generates it again and matches a stop string across the seam. Of overlapping stop strings the first complete one ends the output, however
the text is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """One output of an engine: text, and its token ids if it reports them. No text: the beginning of a character."""

    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string begins after `at` characters of the text of `last`, which is released up to there."""

    last: Piece
    at: int


class StopStrings:
    """The stop strings of one run: at least one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held: list[Piece] = []
        self._text = ""  # of the held pieces

    def feed(self, piece: Piece) -> tuple[list[Piece], StopMatch | None]:
        """Returns the pieces to release, and the stop string, after which nothing may be fed."""
        self._held.append(piece)
        self._text += piece.text
        ends = [(start + len(each), start) for each in self._stop if (start := self._text.find(each)) >= 0]
        at = min(ends)[1] if ends else None
        released = self._release(self._undecided_at() if at is None else at)
        if at is None:
            return released, None
        at -= sum(len(each.text) for each in released)
        return released, StopMatch(Piece(self._text, tuple(token for each in self._held for token in each.token_ids)), at)

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
        """Releases pieces that end at or before a position of the text. A piece without text is the beginning of a character and stays with
        its rest."""
        end = count = 0
        for number, made in enumerate(self._held, start=1):
            end += len(made.text)
            if end > until:
                break
            if made.text:
                count = number
        released, self._held = self._held[:count], self._held[count:]
        self._text = self._text[sum(len(each.text) for each in released) :]
        return released


class TokenStops:
    """The end of one run. `text_of`: a token's addition to the text, None while a character is incomplete."""

    def __init__(self, stop: Sequence[str], text_of: Callable[[int], str | None]) -> None:
        self._strings = StopStrings(stop)
        self._text_of = text_of

    def feed(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """Returns the tokens to release, and whether a stop string matched; nothing may be fed after it."""
        released: list[int] = []
        for token in tokens:
            pieces, found = self._strings.feed(Piece(self._text_of(token) or "", (token,)))
            released += _tokens(pieces)
            if found is not None:
                return released, True
        return released, False

    def flush(self) -> list[int]:
        """All that is held, where the run ends otherwise."""
        return _tokens(self._strings.flush())


def _tokens(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]
