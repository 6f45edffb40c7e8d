"""The command `qlm serve`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import structlog
import yaml

from qlm_cli.options import set_option
from qlm_cli.serve.discovery import FoundServer, discover
from qlm_cli.serve.document import BATCH_MAX, DEFAULT_GPU, KEY_VARIABLE, Document, ServeOptions, document
from qlm_cli.serve.first_profile import measure_first
from qlm_cli.serve.local import LocalOptions, local_document
from qlm_cli.serve.machine import local_model, this_host
from qlm_cli.up.cluster import Cluster
from qlm_cli.up.command import ClusterRun, locked
from qlm_cli.up.config import UpConfig
from qlm_core.vocabulary.errors import ConfigError, QlmError
from qlm_process.config import load_config
from qlm_process.logs import configure_logging
from qlm_process.runner import run_service

DISCOVER_EVERY_S = 5.0
SERVERS_MAX = 256
FILE_BYTES_MAX = 64 << 10
CONFIG_FILE = "serve.yaml"


def _pairs(_ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if not all(pairs) or not all(pairs.values()):
        raise click.BadParameter(f"is {parameter.metavar}")
    return pairs


def _counts(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    pairs = _pairs(context, parameter, values)
    if not all(count.isdecimal() and int(count) for count in pairs.values()):
        raise click.BadParameter(f"is {parameter.metavar}, with N >= 1")
    return {name: int(count) for name, count in pairs.items()}


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option(
    "--servers",
    "servers_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of more URLs, one a line. It is read every 5 s: servers are added and removed while all else runs.",
)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="API key of the servers. Default: QLM_ENGINE_API_KEY, or none.",
)
@click.option(
    "--engine",
    type=click.Choice(["openai", "vllm"]),
    default="openai",
    show_default=True,
    help="openai: in front of servers that run. vllm: vLLM on this machine, with the models of --model.",
)
@click.option(
    "--model",
    "folders",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="vllm: folder of a model, named after it. May be repeated: models that share GPUs take turns.",
)
@click.option("--gpus", type=click.IntRange(min=0), metavar="COUNT", help="vllm: GPUs to use, the first ones. 0: the CPU. Default: all.")
@click.option("--pin", "pins", multiple=True, callback=_counts, metavar="MODEL=N", help="vllm: N instances that serve this model alone.")
@click.option(
    "--gpu", metavar="NAME", help=f"GPU of the servers: where predictions begin. Default: {DEFAULT_GPU}; vllm: the driver's name."
)
@click.option("--n-gpu", type=click.IntRange(min=0), default=0, help="GPUs of a server; 0, the default: as many as its model needs.")
@click.option("--batch-max", type=click.IntRange(min=1), help="Most requests that an engine runs at once. Default: 256; on a CPU 16.")
@click.option("--alias", "aliases", multiple=True, callback=_pairs, metavar="NAME=MODEL", help="Another name of a model; may be repeated.")
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    callback=_pairs,
    metavar="MODEL=FILE",
    help="A model's tokenizer.json: exact counts, and on vLLM streams that go on token by token after any loss. May be repeated.",
)
@click.option(
    "--first-profile/--no-first-profile",
    default=True,
    show_default=True,
    help="Measure the servers while they serve: some 30 requests of each model, a minute at most, unless the queue has its profile.",
)
@click.option("--http", default="127.0.0.1:8080", show_default=True, metavar="HOST:PORT", help="Where the OpenAI API listens.")
@click.option("--grpc", default="127.0.0.1:50051", show_default=True, metavar="HOST:PORT", help="Where the gRPC API listens.")
@click.option("--state-dir", default="qlm-state", show_default=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Folder of the queue's data, the logs and the configuration that is made, serve.yaml.")  # fmt: skip
@set_option
def serve(
    urls: tuple[str, ...],
    servers_file: Path | None,
    api_key_file: Path | None,
    engine: str,
    folders: tuple[Path, ...],
    gpus: int | None,
    pins: Mapping[str, int],
    gpu: str | None,
    n_gpu: int,
    batch_max: int | None,
    aliases: Mapping[str, str],
    tokenizers: Mapping[str, str],
    first_profile: bool,
    http: str,
    grpc: str,
    state_dir: Path,
    overrides: dict[str, str],
) -> None:
    """Put a durable queue in front of OpenAI-compatible servers that run already, such as http://gpu-1:8000 http://gpu-2:8000, or of vLLM
    on this machine (--engine vllm --model DIR).

    Finds models and contexts, makes a configuration, and runs a whole cluster on it, with one agent a server, or one for the GPUs that a
    model needs. Servers that cannot be reached join when they can. Predictions begin from data sheets; servers are measured once, beside
    the traffic, and their speed is learned as they serve. Ctrl-C drains and stops, as for `qlm up`.

    Exit codes: 0 stopped, 1 failed, 2 wrong use or configuration, or no server serves.
    """
    for_servers, for_vllm = bool(urls or servers_file or api_key_file or tokenizers or n_gpu), bool(folders or pins or gpus is not None)
    if engine == "vllm" and (for_servers or not folders):
        raise click.UsageError("--engine vllm needs --model, and takes no URL, --servers, --api-key-file, --tokenizer or --n-gpu")
    if engine != "vllm" and for_vllm:
        raise click.UsageError("--model, --gpus and --pin need --engine vllm")
    files = str(state_dir.resolve() / "files")
    if engine == "vllm":
        local = LocalOptions(http=http, grpc=grpc, files=files, batch_max=batch_max or 0, pins=pins, aliases=aliases)
        with locked(state_dir):
            settings = local_document([local_model(folder) for folder in folders], this_host(gpu, gpus), local)
            sys.exit(_run(settings, state_dir, overrides))
    api_key = api_key_file.read_text(encoding="utf-8").strip() if api_key_file else os.environ.get(KEY_VARIABLE, "")
    os.environ[KEY_VARIABLE] = api_key  # agents inherit it
    options = ServeOptions(
        http=http,
        grpc=grpc,
        files=files,
        gpu=gpu or DEFAULT_GPU,
        n_gpu=n_gpu,
        batch_max=batch_max or BATCH_MAX,
        has_api_key=bool(api_key),
        tokenizers=tokenizers,
        aliases=aliases,
    )
    with locked(state_dir):
        servers = ServerList(urls, servers_file, api_key)
        asyncio.run(servers.refresh())
        if not servers.found:
            raise ConfigError("; ".join(f"{url}: {reason}" for url, reason in servers.missing.items()) or "give the URL of a server")
        beside: list[Beside] = [partial(_follow, servers, options)]
        if first_profile:
            beside.append(lambda cluster, _settings, path, given: measure_first(cluster, path, given))
        sys.exit(_run(document(list(servers.found.values()), options), state_dir, overrides, *beside))


Beside = Callable[[Cluster, Document, Path, Mapping[str, object]], Coroutine[None, None, None]]


def _run(settings: Document, state_dir: Path, overrides: Mapping[str, str], *beside: Beside) -> int:
    """Writes the configuration and runs the cluster until it is stopped, with these tasks beside it; the exit code."""
    path = state_dir / CONFIG_FILE
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    given = {**overrides, "queue.state_dir": str(state_dir)}
    config = load_config(UpConfig, str(path), overrides=given)
    configure_logging(config.telemetry, "serve", config.queue.name)
    cluster = Cluster(config, str(path.resolve()), given)
    run = ClusterRun(cluster)

    async def main(stop: asyncio.Event) -> None:
        tasks = [asyncio.create_task(each(cluster, settings, path, given)) for each in beside]
        try:
            await run.main(stop)
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    return run_service(main) or run.exit_code


class ServerList:
    """The servers of the command line and of the file. `found`: URL -> server as it last answered; `missing`: URL -> why it never did."""

    def __init__(self, urls: tuple[str, ...], file: Path | None, api_key: str) -> None:
        self._urls = urls
        self._file = file
        self._api_key = api_key
        self.found: dict[str, FoundServer] = {}
        self.missing: dict[str, str] = {}

    async def refresh(self) -> None:
        """Reads the file and queries all servers. A server that is away stays as it was: its agent waits for it. Raises ConfigError."""
        urls = self._listed()
        found, missing = await discover(urls, self._api_key)
        answers = {server.url: server for server in found}
        self.found = {url: server for url in urls if (server := answers.get(url) or self.found.get(url)) is not None}
        now_missing = {each.url: each.reason for each in missing if each.url not in self.found}
        for url, reason in now_missing.items():
            if self.missing.get(url) != reason:
                structlog.get_logger().warning("server_missing", url=url, reason=reason)
        self.missing = now_missing

    def _listed(self) -> list[str]:
        lines: list[str] = []
        if self._file is not None:
            with self._file.open(encoding="utf-8") as file:
                lines = [line.partition("#")[0].strip() for line in file.read(FILE_BYTES_MAX).splitlines()]
        urls = list(dict.fromkeys(url.rstrip("/").removesuffix("/v1") for url in (*self._urls, *lines) if url))
        if len(urls) > SERVERS_MAX:
            raise ConfigError(f"at most {SERVERS_MAX} servers, got {len(urls)}")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{url}: the URL of a server begins with http:// or https://")
        return urls


async def _follow(
    servers: ServerList, options: ServeOptions, cluster: Cluster, settings: Document, path: Path, given: Mapping[str, object]
) -> None:
    """Runs until cancelled. A change that cannot be taken is logged, and what was before goes on."""
    while True:
        await asyncio.sleep(DISCOVER_EVERY_S)
        if not cluster.state.ready:
            continue
        try:
            await servers.refresh()
            made = document(list(servers.found.values()), options)
            if made == settings:
                continue
            if not servers.found:
                raise ConfigError("no server is left: the last ones stay")
            text = yaml.safe_dump(made, sort_keys=False)
            await asyncio.to_thread(path.write_text, text, "utf-8")
            config = load_config(UpConfig, str(path), overrides=given)
            structlog.get_logger().info("servers_changed", servers=len(servers.found))
            await cluster.follow(config, changed_processes(settings, made))
            settings = made
        except (QlmError, OSError, ValueError) as error:  # the last: a file that is not UTF-8
            structlog.get_logger().error("servers_not_followed", error=str(error))


def changed_processes(before: Document, after: Document) -> list[str]:
    """Names of processes of both documents that read other settings after the change: all but agents where any model changed, and agents
    whose section or models did."""
    models = [{model["name"]: model for model in each["models"]} for each in (before, after)]
    agents = {agent["name"]: agent for agent in before["agents"]}
    return [
        *(() if models[0] == models[1] else ("gateway-0", "planner-0", "estimator-0")),
        *(
            agent["name"]
            for agent in after["agents"]
            if agent["name"] in agents
            and (agent != agents[agent["name"]] or any(models[0][name] != models[1][name] for name in agent["models"]))
        ),
    ]
