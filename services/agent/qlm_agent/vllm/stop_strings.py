"""Stop strings on token ids: output ends before a stop string, and none of it is ever told.

Tokens whose text may be the beginning of a stop string are held back until that is decided. So what an evicted request was told ends with
no such beginning, and the next attempt finds a stop string that lies across the seam: it makes all of its tokens again. A token in which a
stop string begins is part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopStrings:
    """The end of one run. `text_of`: what a token adds to the text, None while a character is not complete."""

    def __init__(self, stop: Sequence[str], text_of: Callable[[int], str | None]) -> None:
        self._stop = tuple(stop)
        self._text_of = text_of
        self._held: list[tuple[int, int]] = []  # tokens not told, and where the text of each begins
        self._text = ""  # of the held tokens, as far as it is known

    def feed(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens that may be told now, and whether a stop string was found; nothing may be fed after that."""
        told: list[int] = []
        for token in tokens:
            text = self._text_of(token)
            self._held.append((token, len(self._text)))
            if text is None:
                continue
            self._text += text
            found = min((at for each in self._stop if (at := self._text.find(each)) >= 0), default=None)
            if found is not None:
                told += self._release(found)
                self._held = []
                return told, True
            told += self._release(self._undecided_at())
        return told, False

    def flush(self) -> list[int]:
        """All that is held, where the run ends otherwise."""
        held, self._held = [token for token, _ in self._held], []
        return held

    def _undecided_at(self) -> int:
        """Where the longest beginning of a stop string at the end of the text starts."""
        text = self._text
        for at in range(max(0, len(text) - max(map(len, self._stop)) + 1), len(text)):
            if any(each.startswith(text[at:]) for each in self._stop):
                return at
        return len(text)

    def _release(self, until: int) -> list[int]:
        """Takes the tokens that end at or before a place of the text."""
        ends = [begin for _, begin in self._held[1:]] + [len(self._text)]
        count = 0
        while count < len(self._held) and ends[count] <= until:
            count += 1
        told = [token for token, _ in self._held[:count]]
        cut = self._held[count][1] if count < len(self._held) else len(self._text)
        self._held = [(token, begin - cut) for token, begin in self._held[count:]]
        self._text = self._text[cut:]
        return told
