"""More than the instances serve in time, through real processes (QLM A.3): shed, and advice to add instances."""

from __future__ import annotations

import itertools
from pathlib import Path

from click.testing import CliRunner

import qlm
from qlm_cli.root import root
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE
from running_cluster import RunningCluster, wait_until

MODEL = "mistral-7b"
OUTPUT_TOKENS = 1_500
SLO_S = 8.0
BATCH = 8
PATIENCE_S = 90.0
REQUESTS_MAX = 400
SHED_FROM = 120
SHED_MORE = 2


def submit(client: qlm.Client, number: int, **options: float) -> qlm.Accepted:
    return client.submit(MODEL, [number, 17, LENGTH_TOKEN_BASE + OUTPUT_TOKENS], request_id=f"r{number}", **options)  # type: ignore[arg-type]


def test_requests_that_would_be_late_are_shed_and_instances_are_advised(tmp_path: Path) -> None:
    settings = {
        "agents": f"[{{name: gpu, gpu: A100-80GB, batch_max: {BATCH}}}]",
        "agent.simulated.time_scale": "4",
        "planner.overload": "shed",
        "planner.advice_every_s": "0.5",
    }
    with RunningCluster(tmp_path / "state", settings) as cluster, qlm.Client(cluster.address) as client:
        numbers = itertools.count()
        for number in itertools.islice(numbers, SHED_FROM):
            submit(client, number, slo_s=SLO_S)

        def advice() -> str:
            # More arrive, as in any overload that instances are added for: one that is over is not advised on.
            for number in itertools.islice(numbers, SHED_MORE):
                submit(client, number, slo_s=SLO_S)
            shown = CliRunner().invoke(root, ["status", "--address", cluster.address], env={"COLUMNS": "200"})
            return shown.output.partition("advice: ")[2]

        wait_until(lambda: "more " in advice(), PATIENCE_S, "the planner advises to add instances")
        wait_until(lambda: client.status().live == 0, PATIENCE_S, "everything ends")
        submitted = next(numbers)
        ended = [client.result(f"r{number}") for number in range(submitted)]
        results = [result for result in ended if result is not None]
        assert len(results) == submitted
        shed = [result for result in results if result.state is qlm.RequestState.FAILED]
        assert all(result.error_reason == "SHED" for result in shed)
        assert shed
        assert len(shed) < submitted
        assert all(result.state is qlm.RequestState.COMPLETED for result in results if result not in shed)
