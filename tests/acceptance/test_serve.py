"""`qlm serve` in front of running servers, as processes: found, queued, answered over HTTP, added and removed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import openai
import yaml

from qlm_cli.profiles.exchange import read_profiles
from running_cluster import qlm_command
from running_serve import PATIENCE_S, serve
from running_text_server import RunningTextServer
from text_server import KEY, MODEL, text_prompt


def test_servers_that_run_are_served_with_one_command(tmp_path: Path) -> None:
    first, second, third = RunningTextServer().start(), RunningTextServer().start(), RunningTextServer("--model", "third-model").start()
    listed = tmp_path / "servers"
    listed.write_text("# none yet\n")
    try:
        with serve(tmp_path / "state", f"{first.url}/v1", "--servers", str(listed), "--alias", f"usual={MODEL}", api_key=KEY) as served:
            names = {model["id"] for model in served.call("/v1/models")["data"]}
            assert names == {"text-model", "other-model", "usual"}
            answer = served.chat("usual", text_prompt(1, 10, 7))
            assert len(answer.split()) == 7
            assert served.chat(MODEL, text_prompt(1, 10, 7)) == answer

            listed.write_text(f"{second.url} # the other one\n")
            state = served.until("a second agent", lambda state: len(state.of("agent")) == 2)
            assert {process.name for process in state.of("agent")} == {f"127.0.0.1-{first.port}", f"127.0.0.1-{second.port}"}
            first.kill()
            assert served.chat(MODEL, text_prompt(1, 10, 7)) == answer, "by the other server"

            listed.write_text(third.url)
            gone = f"127.0.0.1-{second.port}"
            served.until("the third in place of the second", lambda state: gone not in {process.name for process in state.of("agent")})
            first.start()
            assert served.chat(MODEL, text_prompt(1, 10, 9)).startswith(answer)
            served.until("its model", lambda _: "third-model" in {model["id"] for model in served.call("/v1/models")["data"]})
            assert len(served.chat("third-model", text_prompt(1, 10, 5)).split()) == 5
            document = yaml.safe_load((tmp_path / "state" / "serve.yaml").read_text())
            assert [model["name"] for model in document["models"]] == ["text-model", "other-model", "third-model"]
            assert KEY not in (tmp_path / "state" / "serve.yaml").read_text()
    finally:
        for server in (first, second, third):
            server.kill()


def test_servers_are_measured_once_while_they_serve(tmp_path: Path) -> None:
    server = RunningTextServer("--model", MODEL).start()
    try:
        with serve(tmp_path / "state", server.url, api_key=KEY) as served:
            address = served.ready().of("gateway")[0].address
            assert served.chat(MODEL, text_prompt(1, 10, 7)), "served from the prior"
            deadline_s = time.monotonic() + PATIENCE_S
            while "first_profile_measured" not in (log := (tmp_path / "state" / "serve.log").read_text()) or not (
                measured := [row for row in read_profiles(None, (address,)).hardware if row.origin == "measured"]
            ):
                assert time.monotonic() < deadline_s, log
                time.sleep(0.2)
            assert {(row.gpu, row.n_gpu, row.model) for row in measured} == {("A100-80GB", 1, MODEL)}
            assert log.count("first_profile_measured") == log.count("first_profile_begins") == 1
    finally:
        server.kill()


def test_a_batch_outlives_its_gateway(tmp_path: Path) -> None:
    server = RunningTextServer().start()
    try:
        with serve(tmp_path / "state", server.url, "--batch-max", "4", api_key=KEY) as served:
            url = served.ready().of("gateway")[0].http
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=20)
            lines = [
                {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions",
                 "body": {"model": MODEL, "prompt": text_prompt(number, 5, 40), "max_tokens": 60}}
                for number in range(120)
            ]  # fmt: skip
            file = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            kills = 0
            deadline_s = time.monotonic() + PATIENCE_S
            poll = client.with_options(max_retries=0)  # the client's own waits grow, and the batch would end meanwhile
            while batch.status != "completed":
                assert time.monotonic() < deadline_s, batch
                time.sleep(0.05)
                try:
                    batch = poll.batches.retrieve(batch.id)
                except (openai.APIConnectionError, openai.InternalServerError):
                    continue
                assert batch.request_counts is not None
                if batch.status != "completed" and batch.request_counts.completed > 30 * kills and kills < 2:
                    os.kill(served.ready().of("gateway")[0].pid, signal.SIGKILL)
                    kills += 1
            assert kills, "all ended before the gateway could be killed once"
            answers = [json.loads(line) for line in client.files.content(batch.output_file_id or "").content.splitlines()]
            assert sorted(each["custom_id"] for each in answers) == sorted(f"c{number}" for number in range(120))
            assert all(len(each["response"]["body"]["choices"][0]["text"].split()) == 40 for each in answers)
    finally:
        server.kill()


def test_no_server_is_an_error_with_its_reason(tmp_path: Path) -> None:
    for url, reason in (("http://127.0.0.1:1", "127.0.0.1:1"), ("gpu-1:8000", "http://")):
        ended = qlm_command("serve", url, "--state-dir", str(tmp_path / "state"))
        assert ended.exit_code == 2
        assert reason in ended.stderr, ended.stderr
