"""Colours that stay apart for colour-blind readers (Okabe and Ito): a hue for each model, a shade for each SLO class."""

from __future__ import annotations

from collections.abc import Sequence

Rgb = tuple[float, float, float]

HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""By the order of the models; more models than hues begin anew."""
SHADE_MAX = 0.68
"""How much white the class with the longest SLO has."""
INK = "#222222"
DIM = "#5F5F5F"
FAINT = "#8A8A8A"
GRID = "#E4E4E4"
DOWN = "#3A3A3A"
KILL = "#C1121F"
CLASS_LINES = ("#222222", "#5F5F5F", "#8A8A8A")
PAPER = "#FFFFFF"


def hue(models: Sequence[str], model: str) -> str:
    """The colour of a model; grey for an unknown one."""
    return HUES[models.index(model) % len(HUES)] if model in models else FAINT


def shade(models: Sequence[str], classes: Sequence[str], model: str, slo_class: str) -> Rgb:
    """The model's hue, the paler the longer the SLO."""
    place = classes.index(slo_class) if slo_class in classes else len(classes) - 1
    white = SHADE_MAX * place / max(1, len(classes) - 1)
    red, green, blue = (int(hue(models, model)[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(value + (1.0 - value) * white for value in (red, green, blue))  # type: ignore[return-value]
