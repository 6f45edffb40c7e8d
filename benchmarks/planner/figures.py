"""The figures of `benchmarks planner`: their names and what they are to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.figures import Figure

EXACTNESS, GAPS, EDF, EQ13, LIVE, ADVICE, BATCH = "exactness", "gaps", "edf", "eq13", "live", "advice", "batch"

FIGURES: Sequence[Figure] = (
    Figure(key="exact_hit_rate", part=EXACTNESS, target="1.0", least={"": 1.0}),
    Figure(key="gap_late", part=GAPS, target="share without one more >= 0.95", points=("share", "mean"), least={"share": 0.95}),
    Figure(key="gap_pct", part=GAPS, target="<= 1%", points=("mean", "p95"), most={"p95": 1.0}),
    Figure(key="event_to_applied_p99_ms", part=LIVE, target="<= 25", most={"": 25.0}),
    Figure(key="replan_100x2000_p99_ms", part=LIVE, target="<= 200", most={"": 200.0}),
    Figure(key="replan_100x10000_ms", part=LIVE, target="<= 1,500", most={"": 1500.0}),
    Figure(key="replan_1x10000_ms", part=LIVE, target="stated"),
    Figure(key="late_vs_edf", part=EDF, target="<= 0.5", most={"": 0.5}),
    Figure(key="late_vs_eq13", part=EQ13, target="<= 0.5", most={"": 0.5}),
    Figure(key="choose_batch_us", part=BATCH, target="<= 300", most={"": 300.0}),
    Figure(key="advice_error", part=ADVICE, target="within 1 in 90% of cases", least={"": 0.9}),
)
BY_KEY: Mapping[str, Figure] = {figure.key: figure for figure in FIGURES}
