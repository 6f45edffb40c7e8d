"""The batch that classes share where a few requests are far longer than all others."""

from __future__ import annotations

import numpy as np

from qlm_core.batch_mix import BatchMix, batch_mix, mixed
from qlm_core.normal_arrays import Floats
from qlm_core.prediction_service import EngineColumns, ServiceColumns, services
from qlm_core.shipped_profiles import shipped_snapshot

ROW = next(row for row in shipped_snapshot().hardware if (row.gpu, row.n_gpu, row.model) == ("A100-80GB", 1, "Mistral-7B"))
ENGINE = EngineColumns.of([(ROW, 256.0)])
SHORT, LONG = 0, 1


def mix_of(count: Floats, output: Floats) -> tuple[ServiceColumns, BatchMix]:
    """Classes of memoryless outputs behind prompts of 300 tokens, and the batch that they share."""
    of, prompt = np.zeros(len(count), dtype=np.int64), np.full(len(count), 300.0)
    served = services(ENGINE, of, prompt, np.zeros(len(count)), output, output**2)
    return served, batch_mix(ENGINE, of, count, prompt, served)


def in_flight_s(count: Floats, output: Floats) -> Floats:
    """What one request of each class adds to the decode work that a full batch holds."""
    served, mix = mix_of(count, output)
    whole = mixed(served, np.zeros(len(count), dtype=np.int64), mix)
    found: Floats = whole.batch_left_s / whole.batch
    return found


def test_one_endless_request_leaves_the_batch_to_the_others() -> None:
    _, alone = mix_of(np.array([5_000.0]), np.array([50.0]))
    _, beside = mix_of(np.array([5_000.0, 1.0]), np.array([50.0, 50_000.0]))
    assert alone.batch[0] == beside.batch[0] == 256.0


def test_many_long_requests_make_the_batch_smaller() -> None:
    _, few = mix_of(np.array([5_000.0, 1.0]), np.array([50.0, 5_000.0]))
    _, many = mix_of(np.array([1_000.0, 4_000.0]), np.array([50.0, 5_000.0]))
    assert many.batch[0] < 0.5 * few.batch[0]


def test_what_long_requests_have_in_flight_is_on_every_seat() -> None:
    """They are seldom among the last that fill a batch, and there all the time."""
    count = np.array([5_000.0, 10.0])
    short, long = in_flight_s(count, np.array([50.0, 50.0])), in_flight_s(count, np.array([50.0, 5_000.0]))
    assert long[SHORT] > 1.5 * short[SHORT]
    assert long[LONG] < long[SHORT]


def test_no_more_is_in_flight_than_there_is_work() -> None:
    count, output = np.array([5_000.0, 10.0]), np.array([50.0, 50_000.0])
    served, mix = mix_of(count, output)
    whole = mixed(served, np.zeros(2, dtype=np.int64), mix)
    work_s = float((count * output * whole.token_s).sum())
    assert 0.0 < mix.batch[0] * float(in_flight_s(count, output)[SHORT]) < work_s
