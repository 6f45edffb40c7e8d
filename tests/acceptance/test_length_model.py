"""The length model in a whole cluster: learned from two tenants, published, used at acceptance, kept over a restart of the estimator."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

import qlm
from qlm.api.v1.estimator_pb2 import GetProfilesRequest
from qlm.api.v1.estimator_pb2_grpc import EstimatorStub
from qlm_cli.root import root
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.length_features import LengthFacts
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE
from qlm_process.wire import profile as profile_wire
from running_cluster import RunningCluster, gone, wait_until

SETTINGS = {"agent.simulated.time_scale": "50", "estimator.publish_every_s": "0.2"}
PATIENCE_S = 60.0
MODEL = "mistral-7b"
OUTPUT_TOKENS = {"terse": 8, "verbose": 300}


def submit_one(client: qlm.Client, number: int) -> None:
    """One request whose answer has the length that its tenant is known for, give or take."""
    tenant = ("terse", "verbose")[number % 2]
    prompt = [number % 1_000] * 20 + [LENGTH_TOKEN_BASE + OUTPUT_TOKENS[tenant] + number % 3]
    client.submit(MODEL, prompt, slo_s=600.0, request_id=f"r{number}", tenant=tenant)
    assert client.result(f"r{number}", tenant=tenant, wait_s=PATIENCE_S) is not None


def published(cluster: RunningCluster) -> ProfileSnapshot:
    """The newest profiles, as any estimator reports them."""
    (estimator,) = cluster.state.of("estimator")
    with grpc.insecure_channel(estimator.address) as channel:
        return profile_wire.from_proto(EstimatorStub(channel).GetProfiles(GetProfilesRequest(), timeout=PATIENCE_S))


def profiles_command(cluster: RunningCluster, *words: str) -> str:
    """Output of `qlm profiles`."""
    shown = CliRunner().invoke(root, ["profiles", "--address", cluster.address, *words], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    return shown.output


def expected(snapshot: ProfileSnapshot, tenant: str) -> int:
    """Output tokens that a gateway expects of the next request of a tenant."""
    facts = LengthFacts(model=MODEL, tenant=tenant, prompt_tokens=21)
    return snapshot.length_model.guess(facts, snapshot.output_curve_for(MODEL, "1024s", "64").median_tokens, 8_000).expected_tokens


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "state", SETTINGS) as cluster, qlm.Client(cluster.address) as client:
        wait_until(lambda: all(model.instances for model in client.models()), PATIENCE_S, "the gateway knows who can serve")
        yield cluster


def test_two_tenants_are_distinguished_at_acceptance_and_after_a_restart(cluster: RunningCluster) -> None:
    numbers = count()
    with qlm.Client(cluster.address) as client, ThreadPoolExecutor(8) as pool:

        def used() -> bool:
            list(pool.map(lambda _: submit_one(client, next(numbers)), range(16)))
            return published(cluster).length_model.used_for(MODEL)

        wait_until(used, 2 * PATIENCE_S, "the length model is used")

        def grouped() -> bool:
            list(pool.map(lambda _: submit_one(client, next(numbers)), range(16)))
            rows = {row.token_class: row.output_tokens_mean for row in published(cluster).workload if row.slo_class == "1024s"}
            return rows.get("64/o16", 1e9) < 20.0 and rows.get("64/o1024", 0.0) > 200.0

        wait_until(grouped, PATIENCE_S, "requests are in the class of their predicted output")

    before = published(cluster)
    assert before.length_model.used_for(MODEL)
    assert expected(before, "terse") == pytest.approx(9, abs=3)
    assert expected(before, "verbose") == pytest.approx(301, rel=0.25)
    (score,) = before.length_model.scores
    assert score.gain > 0.3

    document = json.loads(profiles_command(cluster, "--json"))
    assert [(each["model"], each["used"], each["gain"] > 0.3) for each in document["length_model"]] == [(MODEL, True, True)]
    classes = {(row["slo_class"], row["token_class"]): row for row in document["workload"]}
    assert classes["1024s", "64/o16"]["output_tokens_p50"] == pytest.approx(9, abs=3)
    assert classes["1024s", "64/o1024"]["output_tokens_mean"] > 200.0
    assert all(0.0 < row["output_tokens_p50"] <= row["output_tokens_p90"] for row in classes.values())
    shown = profiles_command(cluster)
    for word in ("64/o16", "64/o1024", "not ended", "gain", "yes"):
        assert word in shown

    (estimator,) = cluster.state.of("estimator")
    os.kill(estimator.pid, signal.SIGKILL)
    wait_until(lambda: gone(estimator.pid), PATIENCE_S, "the estimator is dead")
    cluster.wait_for(lambda state: state.ready and state.of("estimator")[0].pid != estimator.pid)
    left = published(cluster)  # the last of the old one
    with qlm.Client(cluster.address) as client:
        submit_one(client, next(numbers))
    wait_until(lambda: published(cluster).version > left.version, PATIENCE_S, "the new estimator publishes")
    after = published(cluster)
    for tenant in ("terse", "verbose"):
        assert expected(after, tenant) == pytest.approx(expected(left, tenant), rel=0.25)
