"""Progress of a replay: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qlm_load.replay.ledger import Ledger
from qlm_load.replay.replay import Replay

BAR_EVERY_S = 0.25
LINE_EVERY_S = 10.0


async def show_progress(console: Console, replay: Replay, ledger: Ledger, start_s: float) -> None:
    """Runs until cancelled; draws a last time then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=False) as bar:
        bar.add_task("requests", total=replay.progress().total, now="")
        try:
            while True:
                await asyncio.sleep(BAR_EVERY_S if console.is_terminal else LINE_EVERY_S)
                _draw(console, bar, replay, ledger, start_s)
        finally:
            _draw(console, bar, replay, ledger, start_s)


def _draw(console: Console, bar: Progress, replay: Replay, ledger: Ledger, start_s: float) -> None:
    progress = replay.progress()
    elapsed_s = max(time.monotonic() - start_s, 1e-9)
    now = f"sent {progress.sent:,}, running or waiting {progress.in_flight:,}, late {ledger.late:,}, {progress.ended / elapsed_s:.1f} req/s"
    if console.is_terminal:
        bar.update(bar.task_ids[0], completed=progress.ended, now=now)
    else:
        console.print(f"{elapsed_s:6.1f} s  {progress.ended:,}/{progress.total:,}  {now}")
