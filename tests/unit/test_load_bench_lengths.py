"""The measurement of output lengths: what it counts, on traces that are made here."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from benchmarks.estimator.lengths import measure_file, measure_lengths

from qlm_core.errors import ConfigError


def write(path: Path, *, clients: bool, rows: int = 2_500) -> Path:
    """Two clients of one median, or nobody that could be told apart; one request a second."""
    rng = np.random.default_rng(1)
    lines = ["arrival_s,input_tokens,output_tokens" + (",model,client" if clients else "")]
    for number in range(rows):
        client = int(rng.integers(2))
        center = (30.0, 300.0)[client] if clients else 100.0
        output = max(1, round(float(rng.lognormal(np.log(center), 0.4))))
        lines.append(f"{number},{rng.integers(100, 200)},{output}" + (f",m,c{client}" if clients else ""))
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


def test_what_can_be_told_apart_is_gained(tmp_path: Path) -> None:
    errors = measure_file(write(tmp_path / "two.csv.gz", clients=True))
    assert errors.gain_percent > 40.0
    assert errors.used > 0.8


def test_where_nothing_can_be_gained_nothing_is_lost(tmp_path: Path) -> None:
    errors = measure_file(write(tmp_path / "one.csv.gz", clients=False))
    assert errors.gain_percent > -0.5
    assert errors.expected <= errors.model


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "two.csv.gz", clients=True, rows=600)
    assert measure_file(path, 3) == measure_file(path, 3)
    assert measure_file(path, 3) != measure_file(path, 4)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="azure_conv_2023"):
        measure_lengths(tmp_path, [1])
