"""The estimator of a real cluster is killed, and nobody starts another: nothing stops, predictions continue from the last profiles."""

from __future__ import annotations

import os
import signal

import pytest

import qlm
from running_cluster import RunningCluster, gone, qlm_command, wait_until

MODEL = "mistral-7b"
PATIENCE_S = 60.0
COMMAND_TIMEOUT_S = 60


def submitted(client: qlm.Client, request_id: str) -> qlm.Accepted:
    return client.submit(MODEL, f"A prompt of {request_id}.", slo_s=600.0, max_tokens=32, request_id=request_id)


@pytest.mark.xdist_group("cluster")
def test_gateway_planner_and_agents_go_on_with_the_last_profiles(cluster: RunningCluster) -> None:
    with qlm.Client(cluster.address) as client:
        wait_until(lambda: all(model.instances for model in client.models()), PATIENCE_S, "the gateway knows who can serve")
        for number in range(5):
            submitted(client, f"before{number}")
            assert client.result(f"before{number}", wait_s=PATIENCE_S) is not None
        versions: list[int] = []

        def learned() -> bool:
            prediction = submitted(client, f"learned{len(versions)}").prediction
            versions.append(0 if prediction is None else prediction.profile_version)
            return versions[-1] > 0

        wait_until(learned, PATIENCE_S, "what was learned is published and predicts")

        (estimator,) = cluster.state.of("estimator")
        cluster.send(signal.SIGSTOP)  # a frozen supervisor starts nobody
        try:
            os.kill(estimator.pid, signal.SIGKILL)
            wait_until(lambda: gone(estimator.pid), PATIENCE_S, "the estimator is dead")
            for number in range(10):
                accepted = submitted(client, f"after{number}")
                assert accepted.prediction is not None
                assert accepted.prediction.profile_version >= versions[-1]
                assert 0.0 <= accepted.prediction.completion_p50_s <= accepted.prediction.completion_p90_s
            for number in range(10):
                result = client.result(f"after{number}", wait_s=PATIENCE_S)
                assert result is not None
                assert result.state is qlm.RequestState.COMPLETED
            shown = qlm_command("status", "after0", "--address", cluster.address)
            assert shown.exit_code == 0, shown.stderr
            assert "completed" in shown.stdout
        finally:
            cluster.send(signal.SIGCONT)
