"""Stop strings on token ids. A token in which a stop string begins is part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qlm_agent.delivery.stop_strings import Piece, StopStrings


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
