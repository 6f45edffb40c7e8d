"""docker-compose.yml run: its images, both APIs, confinement, and kills of containers (`make test-compose`)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from benchmarks.gateway.stream_client import CALL_TIMEOUT_S, StreamedChat
from benchmarks.queue.prompts import MODEL, VOCABULARY_SIZE

import qlm
from docker_engine import Engine, EngineMissing, compose_program, docker_engine, with_images
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES, answer_tokens, prompt_digest, text_token_ids
from running_cluster import wait_until

pytestmark = [
    pytest.mark.xdist_group("compose"),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.environ.get("QLM_TEST_COMPOSE") != "1", reason="takes minutes: `make test-compose` runs it (QLM_TEST_COMPOSE=1)"),
]

ROOT = Path(__file__).parents[2]
SOURCES = (
    "docker-compose.yml", "deploy", ".dockerignore", "pyproject.toml", "constraints.txt", "constraints-gpu.txt", "README.md", "LICENSE",
    "src", "services", "load",
)  # fmt: skip
BUILT = {"gateway", "planner", "planner-standby", "estimator", "agent-a100-0", "agent-h100-0"}
SERVICES = BUILT | {"valkey"}
BUILD_TIMEOUT_S = 1800.0
HEALTHY_TIMEOUT_S = 240.0
"""For a busy machine, on which two planners compile their solvers."""
TIMEOUT_S = 120.0
SLO_S = 120.0
STREAM_TOKENS = 600
"""Ten seconds and more, undisturbed."""
KILL_AT_TOKENS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The simulated cluster of docker-compose.yml in a folder with a copy of the sources."""

    engine: Engine
    folder: Path
    project: str
    ports: dict[str, int]
    program: tuple[str, ...]

    def compose(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
        command = (*self.program, "--project-name", self.project, "--profile", "simulated", *arguments)
        return self.engine.run(*command, cwd=self.folder, timeout_s=timeout_s)

    def build(self) -> None:
        self.compose("build", timeout_s=BUILD_TIMEOUT_S)

    def up(self) -> None:
        """Starts what does not run, and returns once all services are healthy."""
        self.compose("up", "--detach", "--no-build", timeout_s=HEALTHY_TIMEOUT_S)
        try:
            wait_until(self.healthy, HEALTHY_TIMEOUT_S, "all services are healthy")
        except AssertionError as failure:
            raise AssertionError(f"{self.compose('ps')}{self.compose('logs', '--tail', '40')}") from failure

    def healthy(self) -> bool:
        found = self.containers()
        return {name for name in found if found[name]["State"].get("Health", {}).get("Status") == "healthy"} == SERVICES

    def containers(self) -> dict[str, dict[str, Any]]:
        """Output of `docker inspect` for the container of each service, also of one that has ended."""
        ids = self.engine.run("docker", "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={self.project}").split()
        found = json.loads(self.engine.run("docker", "inspect", *ids)) if ids else []
        return {each["Config"]["Labels"]["com.docker.compose.service"]: each for each in found}

    def container(self, service: str) -> str:
        return str(self.containers()[service]["Id"])

    def layers(self, service: str) -> list[str]:
        """Layers of the image that was built last."""
        found = json.loads(self.engine.run("docker", "image", "inspect", f"{self.project}{'-' if len(self.program) > 1 else '_'}{service}"))
        return [str(layer) for layer in found[0]["RootFS"]["Layers"]]

    def inside(self, service: str, *command: str) -> str:
        return self.engine.run("docker", "exec", self.container(service), *command)

    def kill(self, service: str) -> None:
        self.engine.run("docker", "kill", self.container(service))

    def key(self, role: str) -> str:
        return self.inside("gateway", "cat", f"/etc/qlm-keys/{role}.key").strip()

    def grpc(self, role: str = "client") -> qlm.AsyncClient:
        address = f"127.0.0.1:{self.ports['QLM_GRPC_PORT']}"
        return qlm.AsyncClient(address, credentials=qlm.Credentials(api_key=self.key(role)), reconnect_attempts_max=100)

    def http(self, key: str) -> openai.AsyncOpenAI:
        url = f"http://127.0.0.1:{self.ports['QLM_HTTP_PORT']}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=CALL_TIMEOUT_S)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Images of a copy of the sources."""
    folder = tmp_path_factory.mktemp("compose")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    try:
        with docker_engine() as found, tempfile.TemporaryDirectory(prefix="qlm-images-") as images:
            engine = with_images(found, Path(images))
            ports = dict(zip(("QLM_GRPC_PORT", "QLM_HTTP_PORT"), free_ports(2), strict=True))
            engine = Engine(environment={**engine.environment, **{name: str(port) for name, port in ports.items()}})
            stack = Stack(engine=engine, folder=folder, project="qlm-test", ports=ports, program=compose_program(engine))
            try:
                stack.build()
                stack.up()
                yield stack
            finally:
                stack.compose("down", "--volumes", "--rmi", "local", "--timeout", "30")
    except EngineMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def stack(built: Stack) -> Stack:
    """The cluster, up and healthy."""
    if not built.healthy():
        built.up()
    return built


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def answer_to(prompt: str, count: int) -> list[int]:
    """The simulated model's tokens."""
    answer = answer_tokens(prompt_digest(MODEL, text_token_ids(prompt, VOCABULARY_SIZE)), 0, count, VOCABULARY_SIZE)
    return [int.from_bytes(answer[at : at + TOKEN_BYTES], "little") for at in range(0, len(answer), TOKEN_BYTES)]


async def status_of(client: qlm.AsyncClient, request_id: str) -> qlm.RequestStatus:
    found = (await client.status(request_id)).request
    assert found is not None
    return found


async def output_tokens(client: qlm.AsyncClient, request_id: str) -> int:
    """0 of a request that is not accepted yet."""
    try:
        return (await status_of(client, request_id)).output_tokens
    except qlm.errors.NotFound:
        return 0


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_container_has_no_rights_but_its_own(stack: Stack, service: str) -> None:
    found = stack.containers()[service]
    host, user = found["HostConfig"], found["Config"]["User"]
    assert (host["ReadonlyRootfs"], host["Privileged"], host["CapDrop"], host["CapAdd"] or []) == (True, False, ["ALL"], [])
    assert host["Memory"] == (8 if service == "valkey" else 4) << 30
    assert host["NanoCpus"] == 2e9
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert {mount["Destination"] for mount in found["Mounts"] if mount["RW"]} == ({"/data"} if service == "valkey" else set())
    assert user == ("999:1000" if service == "valkey" else "10001:10001")
    # And so it runs.
    status = dict(re.findall(r"^(\w+):\s+(.*)$", stack.inside(service, "cat", "/proc/1/status"), re.MULTILINE))
    uid, gid = user.split(":")
    assert (status["Uid"].split(), status["Gid"].split()) == ([uid] * 4, [gid] * 4)
    assert (int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"]) == (0, 0, "1")
    written = stack.engine.attempt("docker", "exec", "--user", "0", stack.container(service), "touch", "/opt/written")
    assert "Read-only file system" in written.stderr


async def test_both_apis_answer_with_the_generated_key_alone(stack: Stack) -> None:
    key = stack.key("client")
    async with stack.http(key) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Who?"}], max_tokens=5)
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens <= 5
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="none").models.list()
    async with stack.grpc() as client:
        await client.submit(MODEL, "Who is there?", slo_s=SLO_S, max_tokens=7, ignore_eos=True, request_id="first")
        result = await client.result("first", wait_s=TIMEOUT_S)
        assert result is not None
        assert list(result.token_ids) == answer_to("Who is there?", 7)
        with pytest.raises(qlm.errors.QlmError, match="operator"):
            await client.pause(model=MODEL)
    # Keys are on their volume alone.
    for role in ("client", "operator", "service"):
        secret = stack.key(role)
        assert secret not in json.dumps(stack.containers())
        assert secret not in stack.compose("logs")


@pytest.mark.parametrize("killed", ["gateway", "agent", "planner", "valkey"])
async def test_streams_go_on_token_by_token_where_a_container_is_killed(stack: Stack, killed: str) -> None:
    prompt, chat_id, tokens = f"Tell me of the {killed}.", f"chat-{killed}", list[int]()
    chat = StreamedChat(key=chat_id, content=prompt, max_tokens=STREAM_TOKENS, slo_s=SLO_S, by_event=True)

    async def read(stream: qlm.TokenStream) -> None:
        async for chunk in stream:
            assert chunk.offset == len(tokens)
            tokens.extend(chunk.token_ids)

    async with stack.grpc() as client, stack.http(stack.key("client")) as http:
        stream = client.generate(MODEL, prompt, slo_s=SLO_S, max_tokens=STREAM_TOKENS, ignore_eos=True, request_id=f"stream-{killed}")
        async with asyncio.timeout(2 * TIMEOUT_S), asyncio.TaskGroup() as readers:
            readers.create_task(read(stream))
            readers.create_task(chat.read([http], 0, 2 * TIMEOUT_S))
            while min(len(tokens), await output_tokens(client, chat_id)) < KILL_AT_TOKENS:
                await asyncio.sleep(0.02)
            instance = (await status_of(client, stream.request_id)).instance
            await asyncio.to_thread(stack.kill, f"agent-{instance}" if killed == "agent" else killed)
            assert len(tokens) < STREAM_TOKENS
            await asyncio.to_thread(stack.up)
    assert tokens == answer_to(prompt, STREAM_TOKENS)
    assert stream.result is not None
    assert stream.result.attempts >= (2 if killed == "agent" else 1)
    if killed == "gateway":
        assert min(stream.resumes, chat.resumes) >= 1


async def test_an_enqueued_request_is_answered_after_server_and_planners_are_killed(stack: Stack) -> None:
    async with stack.grpc() as client, stack.grpc("operator") as operator:
        await operator.pause(model=MODEL)
        await client.submit(MODEL, "Later.", slo_s=SLO_S, max_tokens=9, ignore_eos=True, request_id="enqueued")
        for service in ("valkey", "planner", "planner-standby"):
            await asyncio.to_thread(stack.kill, service)
        await asyncio.to_thread(stack.up)
        assert not (await status_of(client, "enqueued")).state.terminal
        assert await operator.resume(model=MODEL)
        result = await client.result("enqueued", wait_s=TIMEOUT_S)
    assert result is not None
    assert list(result.token_ids) == answer_to("Later.", 9)


async def test_a_process_that_dies_is_started_again(stack: Stack) -> None:
    before = restarts(stack)
    for service in BUILT:  # the server is the first process of its container, which no signal from inside kills
        stack.engine.attempt("docker", "exec", stack.container(service), "sh", "-c", "kill -9 -1")
    wait_until(lambda: restarts(stack) == {service: before[service] + 1 for service in BUILT}, TIMEOUT_S, "all processes are started again")
    wait_until(stack.healthy, HEALTHY_TIMEOUT_S, "all services are healthy again")


def restarts(stack: Stack) -> dict[str, int]:
    """How often the engine started the process of each container again since somebody did."""
    return {service: found["RestartCount"] for service, found in stack.containers().items() if service in BUILT}


async def test_keys_and_results_outlive_the_containers(stack: Stack) -> None:
    key = stack.key("client")
    async with stack.grpc() as client:
        await client.submit(MODEL, "Remember this.", slo_s=SLO_S, max_tokens=11, ignore_eos=True, request_id="kept")
        before = await client.result("kept", wait_s=TIMEOUT_S)
    stack.compose("down", "--timeout", "30")
    assert stack.containers() == {}
    stack.up()
    assert stack.key("client") == key
    async with stack.grpc() as client, stack.http(key) as http:
        assert before is not None
        assert await client.result("kept", wait_s=0.0) == before
        found = await http.get("/requests/kept", cast_to=dict[str, Any])
        assert (found["state"], found["output_tokens"]) == ("completed", 11)
        assert found["result"]["choices"][0]["message"]["content"] == before.text


def test_a_change_of_sources_makes_one_layer_of_an_image(built: Stack) -> None:
    before = {service: built.layers(service) for service in BUILT}
    with (built.folder / "src/qlm_core/__init__.py").open("a") as module:
        module.write("CHANGED = True\n")
    built.build()
    for service, layers in before.items():
        assert built.layers(service)[:-1] == layers[:-1]
        assert built.layers(service)[-1] != layers[-1]
    code = "import qlm_core, sys; sys.exit(not qlm_core.CHANGED)"
    built.compose("run", "--rm", "--no-deps", "--entrypoint", "python", "estimator", "-c", code)
