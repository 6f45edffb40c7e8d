"""The agent's choice of how many requests run at once: 256 run, and 100 groups of five SLO classes wait behind them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.parts import Measured
from benchmarks.planner.parts import Plan
from qlm_agent.decisions.batch_size import CHOOSE_EVERY_S, BatchSize
from qlm_agent.decisions.events import PulledRun, QueueHead, WaitingGroup
from qlm_agent.decisions.expectations import Expectations
from qlm_agent.decisions.runs import Run, RunTable
from qlm_agent.decisions.settings import MachineSettings
from qlm_core.operations.preemption import Urgency
from qlm_core.profiles.shipped_profiles import shipped_snapshot

RUNNING, WAITING, CHOICES = 256, 100, 2_000
SLOS = (("8s", 5.0, True), ("32s", 20.0, False), ("64s", 60.0, False), ("512s", 300.0, False), ("4096s", 3_600.0, False))


def measure(plan: Plan) -> Measured:
    model, runs = "Mistral-7B", RunTable()
    rows = {row.model: row for row in shipped_snapshot().hardware if (row.gpu, row.n_gpu) == ("A100-80GB", 1)}
    settings = MachineSettings(models=(model,), hardware=rows, batch_by_slo=True)
    batch = BatchSize(settings, runs, Expectations(settings.hardware))
    for number in range(RUNNING):
        slo_class, slo_s, first_token = SLOS[number % len(SLOS)]
        facts: dict[str, Any] = {"run_id": f"r{number}", "queue_id": f"{number}-0", "model": model, "prompt_tokens": 500}
        facts |= {"output_tokens_max": 512, "stored": 9, "slo_class": slo_class, "first_token": first_token}
        batch.record_pull(PulledRun(**facts, slo_s=slo_s, deadline_s=slo_s))
        runs.add(Run(**facts, resumed=0, produced=9, urgency=Urgency(0, slo_s)))
    behind = [
        WaitingGroup(model=model, slo_class=slo, first_token=first, waiting=8, first_deadline_s=1e9)
        for slo, _, first in SLOS * (WAITING // len(SLOS))
    ]
    head = QueueHead(group_id="g", model=model, waiting=8, waiting_prompt_tokens=4_000, slo_class="32s")
    took_us = []
    for number in range(plan.some(CHOICES)):
        began_s = time.process_time()
        batch.choose(2.0 * CHOOSE_EVERY_S * number, model, head, behind)
        took_us.append(1e6 * (time.process_time() - began_s))
    p50, p99 = np.percentile(took_us, (50, 99))
    return Measured(values={"choose_batch_us": round(float(p50))}, details={"p99_us": round(float(p99)), "batch": batch.limit})
