"""Progress of a long measurement, on stderr."""

from __future__ import annotations

import time

from qlm_cli.console import plain_console


class Progress:
    """Lines on stderr, each with the seconds since the start."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._console = plain_console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(f"{self.wall_s:6.1f} s  {text}", markup=False)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._began_s
