"""The batch that classes share: what it is alone, and what it is between others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.batch_mix import batch_mix, mixed
from qlm_core.service_arrays import EngineColumns, ServiceColumns, services
from qlm_core.shipped_profiles import shipped_snapshot

HARDWARE = next(row for row in shipped_snapshot().hardware if (row.gpu, row.n_gpu, row.model) == ("A100-80GB", 1, "Mistral-7B"))
ENGINE = EngineColumns.of([(HARDWARE, 256.0)])


def classes(*rows: tuple[float, float, float, float]) -> tuple[np.ndarray, np.ndarray, np.ndarray, ServiceColumns]:
    """Of (requests, prompt tokens, output tokens, their deviation) on one engine."""
    count, prompt, output, deviation = np.array(rows, dtype=np.float64).T
    of = np.zeros(len(rows), dtype=np.int64)
    return of, count, prompt, services(ENGINE, of, prompt, np.zeros(len(rows)), output, deviation**2)


def mix(*rows: tuple[float, float, float, float]) -> tuple[ServiceColumns, ServiceColumns]:
    """Alone and among each other."""
    of, count, prompt, alone = classes(*rows)
    return alone, mixed(alone, of, batch_mix(ENGINE, of, count, prompt, alone))


def test_one_class_is_what_it_is_alone() -> None:
    alone, among = mix((100.0, 1000.0, 200.0, 150.0))
    for name in ("batch", "step_s", "token_s", "left_tokens", "sequence_s", "joining_s"):
        assert getattr(among, name) == pytest.approx(getattr(alone, name)), name


def test_short_outputs_behind_long_prompts_share_the_batch_of_others() -> None:
    """Alone their prefills would keep most seats empty, so that each of their tokens would pay for many reads of the weights."""
    alone, among = mix((50.0, 4000.0, 60.0, 30.0), (200.0, 800.0, 300.0, 100.0))
    assert alone.batch[0] < 50.0
    assert among.batch[0] == among.batch[1] > 200.0
    assert among.token_s[0] < alone.token_s[0]
    # They still read their own long context for every token.
    assert among.token_s[0] > among.token_s[1]


def test_the_work_in_flight_of_the_classes_adds_up_to_that_of_the_batch() -> None:
    """A class holds seats in proportion to its outputs: in a full batch, B n E[O^2] / (2 sum(n E[O])) tokens of each are left."""
    rows = ((60.0, 500.0, 50.0, 20.0), (40.0, 500.0, 500.0, 400.0))
    of, count, prompt, alone = classes(*rows)
    among = mixed(alone, of, batch_mix(ENGINE, of, count, prompt, alone))
    seats = count / count.sum()
    second = np.array([row[2] ** 2 + row[3] ** 2 for row in rows])
    left = among.batch * count * second / (2.0 * float((count * alone.output).sum()))
    assert float((seats * among.batch_left_s).sum()) == pytest.approx(float((left * among.token_s).sum()))


@given(rows=st.lists(st.tuples(st.floats(1.0, 1e4), st.floats(1.0, 1e5), st.floats(1.0, 1e4), st.floats(0.0, 1e4)), min_size=1, max_size=8))
def test_a_batch_has_a_seat_and_no_more_than_there_are(rows: list[tuple[float, float, float, float]]) -> None:
    _, among = mix(*rows)
    assert (among.batch >= 1.0).all()
    assert (among.batch <= 256.0).all()
    assert np.isfinite(among.token_s).all()
    assert (among.token_s > 0.0).all()
