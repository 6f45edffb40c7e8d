"""The command `picture`, and the demo's pictures."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from qlm_core.vocabulary.errors import ConfigError
from qlm_load.picture.recording import Recording, load

PNG, PAGE, RECORDING = "queues.png", "queues.html", "recording.json"
NEEDS = "pictures need matplotlib: pip install 'qlm-serving[load]'"


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def write_pictures(recording: Recording, folder: Path, rows: tuple[str, list[list[str]]] | None = None) -> tuple[Path, Path]:
    """Writes queues.png and queues.html, the latter with the table (caption and rows) if given; returns their paths."""
    from qlm_load.picture.figure import draw, write_png  # late: matplotlib takes a second
    from qlm_load.picture.page import page

    figure = draw(recording)
    write_png(figure, folder / PNG)
    (folder / PAGE).write_text(page(figure, recording, rows), encoding="utf-8")
    return folder / PNG, folder / PAGE


@click.command()
@click.argument("recording", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the pictures; default: the recording's.")
def picture(recording: Path, out: Path | None) -> None:
    """Redraw RECORDING (recording.json of a demo): queues.png, and queues.html, which needs no network.

    Exit codes: 0 done, 1 matplotlib is not installed, 2 no recording of this version.
    """
    if not can_draw():
        raise click.ClickException(NEEDS)
    try:
        recorded = load(recording)
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    folder = out or recording.parent
    folder.mkdir(parents=True, exist_ok=True)
    for path in write_pictures(recorded, folder):
        click.echo(path)
