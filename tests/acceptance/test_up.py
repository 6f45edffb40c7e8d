"""`qlm up` as a user runs it: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from openai.types.chat import ChatCompletionMessageParam

import qlm
from qlm_cli.reference.metrics import SERVICES, documented
from qlm_process.cluster.state import ProcessState
from running_cluster import RunningCluster, gone, qlm_command, wait_until

pytestmark = pytest.mark.xdist_group("cluster")

MODEL = "mistral-7b"
COMMAND_TIMEOUT_S = 120
ANSWER_S = 60.0
METRICS_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
KILLED = ("gateway-0", "a100-0", "planner-0", "server")
FAST = {"agent.simulated.time_scale": "20"}
SLOW = {"agent.simulated.time_scale": "0.05"}
"""An engine step takes so long that nothing ends by itself while a test looks."""


def up(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`qlm up` as a process, which is to end by itself."""
    command = [sys.executable, "-m", "qlm_cli", "up", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert "Traceback" not in done.stderr
    return done


def test_all_processes_serve(cluster: RunningCluster) -> None:
    state = cluster.state
    assert [(process.service, process.name, process.serving) for process in state.processes] == [
        ("server", "server", True),
        ("gateway", "gateway-0", True),
        ("planner", "planner-0", True),
        ("estimator", "estimator-0", True),
        ("agent", "a100-0", True),
        ("agent", "h100-0", True),
    ]
    assert all(process.metrics_port for process in state.processes if process.service != "server")
    wait_until(lambda: f"Ready. Gateway on {cluster.address}." in cluster.log(), 30.0, "the last line of the table")


def test_every_process_serves_the_metrics_that_the_documents_name(cluster: RunningCluster) -> None:
    services = [process for process in cluster.state.processes if process.service != "server"]
    assert {process.service for process in services} == {service for service, _, _ in SERVICES}
    for process in services:

        def has_all_metrics(process: ProcessState = process) -> bool:
            """A gateway reports the load of models once it has read the queue."""
            with urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=METRICS_TIMEOUT_S) as answer:
                lines = answer.read().decode().splitlines()
            assert any(line.startswith("process_resident_memory_bytes") for line in lines), process.name
            return {line.split()[2] for line in lines if line.startswith("# HELP ")} >= {name for name, _, _ in documented(process.service)}

        wait_until(has_all_metrics, METRICS_TIMEOUT_S, f"all metrics of {process.name}")


def test_every_process_answers_reflection_and_health(cluster: RunningCluster) -> None:
    for process in [process for process in cluster.state.processes if process.service != "server"]:
        service = f"qlm.api.v1.{process.service.capitalize()}"
        with grpc.insecure_channel(process.address) as channel:
            served = set(ProtoReflectionDescriptorDatabase(channel).get_services())
            assert {service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= served, process.name
            for name in ("", service):
                request = health_pb2.HealthCheckRequest(service=name)
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_TIMEOUT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING, process.name


def test_the_sdk_gets_an_answer(cluster: RunningCluster) -> None:
    with qlm.Client(cluster.address) as client:
        first = client.generate(MODEL, "The same prompt.", slo_s=30, max_tokens=30, request_id="sdk-1")
        ids = [token for chunk in first for token in chunk.token_ids]
        assert first.result is not None
        assert first.result.state is qlm.RequestState.COMPLETED
        assert len(ids) == first.result.output_tokens > 0
        stored = client.result("sdk-1")
        assert stored is not None
        assert list(stored.token_ids) == ids
        second = client.generate(MODEL, "The same prompt.", slo_s=30, max_tokens=30)
        assert [token for chunk in second for token in chunk.token_ids] == ids


def test_the_openai_client_gets_an_answer(cluster: RunningCluster) -> None:
    (gateway,) = cluster.state.of("gateway")
    wait_until(lambda: f"OpenAI API on {gateway.http}/v1." in cluster.log(), 30.0, "the URL")
    with openai.OpenAI(base_url=f"{gateway.http}/v1", api_key="none", timeout=ANSWER_S) as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "The same prompt."}]
        chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, service_tier="priority")
        assert chat.service_tier == "priority"
        chunks = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.choices[0].message.content
        assert MODEL in [model.id for model in client.models.list()]


def test_the_command_line_gets_an_answer(cluster: RunningCluster) -> None:
    arguments = ("submit", "--address", cluster.address, "--model", MODEL, "--slo", "30", "--max-tokens", "20")
    streamed = qlm_command(*arguments, "--request-id", "cli-1", "A prompt.")
    assert streamed.exit_code == 0, streamed.stderr
    assert streamed.stdout.strip()
    messages = streamed.stderr.splitlines()
    assert messages[0].startswith("accepted: ")
    assert "ahead, starts in" in messages[0]
    assert messages[-1].startswith("cli-1: completed")
    piped = qlm_command(*arguments, "--no-stream", text="A prompt.")
    assert piped.stdout == streamed.stdout
    document = json.loads(qlm_command(*arguments, "--json", "A prompt.").stdout)
    assert document["text"] == streamed.stdout.rstrip("\n")
    assert document["result"]["state"] == "completed"
    accepted = qlm_command(*arguments, "--no-wait", "--request-id", "cli-2", "A prompt.")
    assert accepted.stdout == "cli-2\n"
    assert "prompt tokens" in accepted.stderr
    assert "ahead, starts in" in accepted.stderr


def test_refusals_are_reported_in_one_line(cluster: RunningCluster) -> None:
    arguments = ("submit", "--address", cluster.address)
    unknown = qlm_command(*arguments, "--model", "gpt-9", "A prompt.")
    assert unknown.exit_code == 1
    assert "[UNKNOWN_MODEL]" in unknown.stderr
    empty = qlm_command(*arguments, "--model", MODEL, text="")
    assert "[EMPTY_PROMPT]" in empty.stderr
    both = qlm_command(*arguments, "--model", MODEL, "--slo", "1", "--priority", "1", "A prompt.")
    assert both.exit_code == 2


def test_status_shows_queues_models_and_a_request(cluster: RunningCluster) -> None:
    shown = qlm_command("status", "--address", cluster.address)
    assert shown.exit_code == 0, shown.stderr
    for word in ("a100-0", "h100-0", "vicuna-13b", "mistral-7b-code", "approximate", "held: queue", "MB of 8,000 MB"):
        assert word in shown.stdout
    document = json.loads(qlm_command("status", "--address", cluster.address, "--json").stdout)
    assert {queue["instance"] for queue in document["virtual_queues"]} >= {"a100-0", "h100-0"}
    missing = qlm_command("status", "--address", cluster.address, "--request", "nobody")
    assert missing.exit_code == 1
    assert "[UNKNOWN_REQUEST]" in missing.stderr


def test_load_replays_a_workload_and_accounts_for_it(cluster: RunningCluster, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("--address", cluster.address, "--requests", "30", "--rate", "3", "--time-scale", "20", "--json", str(report))
    done = qlm_command("load", *arguments)
    assert done.exit_code == 0, done.output
    assert "30/30" in done.stdout, "the progress"
    summary = json.loads(report.read_text())
    assert (summary["completed"], summary["lost"], summary["doubled"], summary["failed"]) == (30, 0, 0, 0)


def test_a_killed_process_is_restarted(cluster: RunningCluster) -> None:
    before = {process.name: process for process in cluster.state.processes}
    for name in KILLED:
        os.kill(before[name].pid, signal.SIGKILL)
    cluster.wait_for(
        lambda state: (
            state.ready
            and all(process.restarts == before[process.name].restarts + 1 for process in state.processes if process.name in KILLED)
        )
    )
    assert cluster.address == before["gateway-0"].address
    with qlm.Client(cluster.address) as client:
        result = client.generate(MODEL, "After the kills.", slo_s=30, max_tokens=20)
        assert sum(chunk.count for chunk in result) > 0


def test_a_second_cluster_in_the_folder_is_refused(cluster: RunningCluster) -> None:
    second = up("--state-dir", str(cluster.state_dir))
    assert second.returncode == 2
    assert "another `qlm up` or `qlm serve` runs in" in second.stderr


def test_a_restart_keeps_an_accepted_request_and_a_signal_drains(tmp_path: Path) -> None:
    cluster = RunningCluster(tmp_path / "state", SLOW)
    with cluster, qlm.Client(cluster.address) as client:
        accepted = client.submit(MODEL, "Keep me.", slo_s=3600, max_tokens=30, request_id="kept")
        assert not accepted.duplicate
        pids = cluster.pids
        cluster.send(signal.SIGINT)
        cluster.send(signal.SIGTERM)  # not a second SIGINT: two that are pending are one
        wait_until(lambda: all(gone(pid) for pid in pids), 30.0, "all processes gone")
        assert cluster.wait() == 1
    again = RunningCluster(tmp_path / "state", FAST)
    with again, qlm.Client(again.address) as client:
        result = client.result("kept", wait_s=ANSWER_S)
        assert result is not None
        assert result.state is qlm.RequestState.COMPLETED
        assert result.queue_id == accepted.queue_id
        repeated = client.submit(MODEL, "Keep me.", slo_s=3600, max_tokens=30, request_id="kept")
        assert repeated.duplicate
        stream = client.generate(MODEL, "Last words.", slo_s=30, max_tokens=200)
        next(stream)
        pids = again.pids
        again.send(signal.SIGTERM)
        assert sum(chunk.count for chunk in stream) > 0
        assert again.wait() == 0, again.log()
        assert [pid for pid in pids if not gone(pid)] == []
        assert not (again.state_dir / "up.json").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("queue.durability=never", "queue.durability"),
        ("up.nonsense=1", "up.nonsense: unknown setting"),
    ],
)
def test_a_wrong_setting_stops_it_with_its_name(tmp_path: Path, setting: str, message: str) -> None:
    ended = qlm_command("up", "--state-dir", str(tmp_path / "state"), "--set", "gateways=[{name: gateway-0}]", "--set", setting)
    assert ended.exit_code == 2, ended.output
    assert message in ended.stderr


def test_a_wrong_setting_of_a_process_stops_all(tmp_path: Path) -> None:
    ended = up("--state-dir", str(tmp_path / "state"), "--set", "gateways=[{name: gateway-0}]", "--set", "gateway.listen=nowhere")
    assert ended.returncode == 2, ended.stderr
    assert "gateway.listen" in ended.stderr


def test_a_process_that_does_not_start_fails_it_in_a_line(tmp_path: Path) -> None:
    # An agent whose server is not there registers nowhere, so it never serves.
    ended = up(
        "--state-dir", str(tmp_path / "state"), "--set", 'gateways=[{name: gateway-0, listen: "127.0.0.1:0"}]',
        "--set", "queue.url=redis://127.0.0.1:1", "--set", "up.start_timeout_s=3", "--set", "up.stop_timeout_s=10",
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert "not serving after 3 s: gateway-0, planner-0, estimator-0, a100-0, h100-0" in ended.stderr
