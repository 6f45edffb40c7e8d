"""A whole cluster with marked passwords, keys and prompts, in good and bad hours: none of the marks is in anything that it writes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import redis

import qlm
from identity_files import add_key
from qlm.errors import QlmError
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.identity.keys import Role
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import Durability
from running_cluster import RunningCluster, qlm_command, wait_until
from running_text_server import RunningTextServer
from text_server import KEY, MODEL

PASSWORD, USER_PASSWORD, PROMPT = "mark-queue-password", "mark-engine-password", "mark-of-a-prompt"
MARKS = (PASSWORD, USER_PASSWORD, PROMPT, KEY)
ANSWER_S = 60.0
COMMAND_TIMEOUT_S = 60

CONFIG = """
models:
  - {{name: sim, profile: Mistral-7B}}
  - {{name: far, profile: Mistral-7B, context_tokens_max: 2048}}
agents:
  - {{name: sim-0, gpu: A100-80GB, models: [sim]}}
  - name: far-0
    gpu: A100-80GB
    models: [far]
    engine: openai
    openai: {{base_url: "{far}", api_key_env: FAR_KEY, output: text, parameters: [], models: {{far: {{remote: {remote}}}}}}}
  - name: gone-0
    gpu: A100-80GB
    models: [far]
    engine: openai
    openai: {{base_url: "http://user:{password}@127.0.0.1:1", output: text}}
"""


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """URL of a server with a password."""
    server = EmbeddedServer(tmp_path / "server", Durability.PROCESS)
    plain = await server.start()
    with redis.Redis.from_url(plain) as client:
        client.config_set("requirepass", PASSWORD)
    yield plain.replace("://", f"://:{PASSWORD}@")
    await server.stop()


def refused(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Output of a command that ends with an error."""
    done = qlm_command(*arguments, environment=environment)
    assert done.exit_code in (1, 2), (arguments, done)
    return done.output


def found_in(*texts: str, keys: tuple[str, ...] = ()) -> list[str]:
    """The marks, each with the line that it is in. `keys`: API keys, of which only the ids may be shown."""
    marks = (*MARKS, *(key.split("_")[2] for key in keys))
    return [f"{mark}: {line[:400]}" for text in texts for line in text.splitlines() for mark in marks if mark in line]


def use(cluster: RunningCluster, server: RunningTextServer, access: qlm.Credentials) -> None:
    """Requests that end well, are refused at once, by the engine or by a faulty server, and are cancelled."""
    with qlm.Client(cluster.address, call_timeout_s=30.0, credentials=access) as client:
        prompts: list[qlm.messages.Prompt] = [f"{PROMPT} [5 words]", [{"role": "user", "content": f"{PROMPT} <|im_end|> [5 words]"}]]
        for model in ("sim", "far"):
            for prompt in prompts:
                assert "".join(chunk.text for chunk in client.generate(model, prompt, slo_s=30, max_tokens=8))
        for name in ("echo", "broken", "nonsense"):
            _fault(server, name)
            client.result(client.submit("far", f"{PROMPT} [9 words]", max_tokens=20).request_id, wait_s=ANSWER_S)
        for wrong in ({"json_schema": PROMPT}, {"stop": [PROMPT * 100]}, {"request_id": f"{PROMPT}\n"}, {"logprobs": 2}):
            with pytest.raises(QlmError):
                list(client.generate("far", PROMPT, **wrong))
        with pytest.raises(QlmError):
            client.submit("sim", PROMPT * (1 << 18))
        client.cancel(client.submit("sim", f"{PROMPT} to be cancelled", max_tokens=4000).request_id)


def _fault(server: RunningTextServer, name: str) -> None:
    body = json.dumps({"name": name, "count": 1}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{server.url}/fault", body, headers), timeout=COMMAND_TIMEOUT_S).close()


def test_no_secret_and_no_prompt_is_in_any_output(url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    server = RunningTextServer().start()
    config = tmp_path / "qlm.yaml"
    config.write_text(CONFIG.format(far=server.url, remote=MODEL, password=USER_PASSWORD))
    settings = {"agent.simulated.time_scale": "20", "telemetry.log_level": "debug"}
    key_file, service_key_file = tmp_path / "keys.json", tmp_path / "service.key"
    key, service_key = add_key(key_file, "default"), add_key(key_file, "services", Role.SERVICE)
    service_key_file.write_text(service_key)
    access = qlm.Credentials(api_key=key)
    environment = {
        "QLM_CONFIG": str(config),
        "QLM_QUEUE__URL": url,
        "FAR_KEY": KEY,
        "QLM_API_KEY": key,
        "QLM_SECURITY__KEY_FILE": str(key_file),
        "QLM_SECURITY__SERVICE_KEY_FILE": str(service_key_file),
    }
    said: list[str] = []
    with RunningCluster(tmp_path / "state", settings, environment) as cluster:
        use(cluster, server, access)
        commands = [Path(f"/proc/{process.pid}/cmdline").read_text() for process in cluster.state.processes]
        assert len(commands) == 6
        said += commands
        for name in ("gateway-0", "sim-0"):  # a fault of each kind, with requests under way
            with qlm.Client(cluster.address, call_timeout_s=30.0, credentials=access) as client:
                client.submit("sim", f"{PROMPT} under way", max_tokens=2000)
            (pid,) = (process.pid for process in cluster.state.processes if process.name == name)
            os.kill(pid, signal.SIGKILL)
            cluster.wait_for(lambda state, pid=pid: state.ready and pid not in [process.pid for process in state.processes])  # type: ignore[misc]
        with redis.Redis.from_url(url) as client_of_server:
            client_of_server.config_set("requirepass", "another")
            client_of_server.client_kill_filter(_type="normal", skipme=True)
            wait_until(lambda: "away" in cluster.log() or "refuses" in cluster.log(), 30.0, "the wrong password is reported")
            client_of_server.config_set("requirepass", PASSWORD)
        use(cluster, server, access)
        add_key(key_file, "another")  # read while it runs
        wait_until(lambda: "keys_read" in cluster.log(), 30.0, "the keys are read")
        state_dir = str(cluster.state_dir)
        address = ["--address", cluster.address]
        for arguments in (
            ["status", "--state-dir", state_dir],
            ["models"],
            ["health", *address],
            ["status", *address],
            ["pause", "sim", *address],
        ):
            said.append(qlm_command(*arguments, environment=environment).output)
        assert cluster.interrupt() == 0, cluster.log()
    server.kill()
    broken = url.replace("redis://", "redis:/")
    for wrong in ("--set", f"queue.url={broken}"), ("--set", f"queue={{url: '{url}', nam: x}}"), ("--set", f"queue={{url: '{url}'"):
        for service in ("up", "gateway", "agent"):
            said.append(refused(service, *wrong))
    for arguments in (
        ["gateway", "--set", f"security.key_file={key}"],
        ["agent", "--set", f"security={{key_file: x, service_key_file: '{key}'}}"],
    ):
        said.append(refused(*arguments, environment={"QLM_QUEUE__URL": "redis://127.0.0.1:1"}))
    said.append(refused("gateway", "--set", f"security={{key_file: '{key}', nam: x}}"))
    said.append(refused("status", "--api-key-file", key))
    said.append(refused("keys", "list", "--file", key))
    listed = qlm_command("keys", "list", "--file", str(key_file))
    assert listed.exit_code == 0
    said += [listed.output, key_file.read_text()]
    logs = [path.read_text() for path in sorted(tmp_path.glob("state/**/*.log*"))]
    assert len(logs) >= 7
    assert sum("accepts" in log or "ready" in log for log in logs) >= 6
    found = found_in(*said, *logs, keys=(key, service_key))
    record_property("marks found", len(found))
    assert found == []


def test_a_wrong_password_is_reported_at_once(url: str, tmp_path: Path) -> None:
    wrong = {
        "a wrong password": url.replace(PASSWORD, USER_PASSWORD),
        "no password": url.replace(f":{PASSWORD}@", ""),
        "an unknown user": url.replace("://:", "://nobody:"),
        "no such database": f"{url}/99999",
    }
    for what, address in wrong.items():
        with pytest.raises(ConfigError, match="the server refuses it") as failure:
            asyncio.run(RedisQueue(address).start())
        assert found_in(str(failure.value), repr(failure.value)) == [], what
    said = refused("up", "--state-dir", str(tmp_path / "up"), environment={"QLM_QUEUE__URL": wrong["a wrong password"]})
    assert "the server refuses it" in said
    assert found_in(said) == []
