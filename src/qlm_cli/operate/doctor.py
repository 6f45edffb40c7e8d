"""The command `qlm doctor`: what keeps a deployment from serving, and damaged records of its queue with their repair."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence

import click
import redis.asyncio as redis

from qlm.api.v1.instance_pb2 import Instance
from qlm_cli.options import config_option, default_config_path, set_option
from qlm_cli.up.config import UpConfig
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.cluster.state import ClusterStateFile
from qlm_process.config import load_config
from qlm_process.queue.connection import open_queue
from qlm_process.settings import QueueSettings
from qlm_queue.damage import Damage
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.keys import Keys
from qlm_queue.overview import Overview
from qlm_queue.redis.address import ServerAddress
from qlm_queue.values import ESTIMATOR_ROLE, PLANNER_ROLE

EXIT_FOUND = 1
SCAN_COUNT = 1_000


@click.command()
@click.option("--repair", "mend", is_flag=True, help="Mend what is damaged, after a try on a copy.")
@click.option("--no-copy", is_flag=True, help="Mend without the try on a copy, which takes the memory of the queue once more.")
@config_option
@set_option
def doctor(mend: bool, no_copy: bool, config_path: str | None, overrides: dict[str, str]) -> None:
    """Check every record of the queue and the deployment: print the damaged records, with their repair, and where none is left what keeps
    the deployment from serving, with what to do. The cluster may run.

    A repair never touches a request whose own record is whole, but to put it where it belongs. A request whose record, body or shown output
    is lost ends FAILED (RECORD_DAMAGED). Exit codes: 0 it serves and nothing is damaged (any more), 1 else, 2 wrong use.
    """
    settings = load_config(UpConfig, config_path or default_config_path(), None, None, dict(overrides)).queue
    if not settings.url:
        settings = settings.model_copy(update={"url": ClusterStateFile(settings.state_dir).read().queue_url})
    found = asyncio.run(_examined(settings, mend=False))
    for each in found:
        click.echo(str(each))
    mended = mend and bool(found)
    if mended:
        if not no_copy:
            left = asyncio.run(_tried_on_a_copy(settings))
            if left:
                raise click.ClickException(f"a repair of a copy leaves {len(left)} damaged, such as {left[0]}; nothing was changed")
        asyncio.run(_examined(settings, mend=True))
        found = asyncio.run(_examined(settings, mend=False))
    problems = () if found else asyncio.run(_problems(settings))  # what is damaged may be what they are read from
    for problem in problems:
        click.echo(problem)
    click.echo(f"mended; {len(found)} damaged now" if mended else f"{len(found)} damaged")
    if found or problems:
        sys.exit(EXIT_FOUND)


async def _problems(settings: QueueSettings) -> Sequence[str]:
    queue = open_queue(settings)
    await queue.start()
    try:
        planner, estimator = await queue.leader_address(PLANNER_ROLE), await queue.leader_address(ESTIMATOR_ROLE)
        return tuple(deployment_problems(await queue.overview(), planner=planner, estimator=estimator))
    finally:
        await queue.stop()


def deployment_problems(overview: Overview, *, planner: str, estimator: str) -> Iterator[str]:
    """A line for each obstacle to serving, with what to do. `planner`, `estimator`: addresses of the leaders, "" for none."""
    if not planner:
        yield "no planner leads, and accepted requests wait for a place: start one (qlm planner)"
    if not estimator:
        yield "no estimator leads, and predictions stay as they are: start one (qlm estimator)"
    served: set[str] = set()
    for instance in overview.instances:
        if instance.alive:
            served.update(Instance.FromString(instance.body).models)
        else:
            yield f"instance {instance.name} is away: start its agent (qlm agent --name {instance.name}), or look at its log"
    if not served:
        yield "no instance serves: start an agent (qlm agent)"
    waiting: Counter[str] = Counter()
    for group in overview.groups.values():
        waiting[group.meta.get("model", "")] += group.waiting
    for model, count in sorted(waiting.items()):
        if count and model not in served:
            yield f"{count} requests wait for {model}, which no instance serves: add it to the models of an agent (agents)"
    for pause in overview.pauses:
        of = "" if pause.kind == "model" else "--tenant "
        yield f"requests of {pause.kind} {pause.name} are paused: end it (qlm resume {of}{pause.name})"


async def _examined(settings: QueueSettings, *, mend: bool) -> Sequence[Damage]:
    queue = open_queue(settings)
    await queue.start()
    try:
        return await queue.repair(mend)
    finally:
        await queue.stop()


async def _tried_on_a_copy(settings: QueueSettings) -> Sequence[Damage]:
    """Returns the damage left after a repair of a copy of the queue, on a server of its own."""
    with tempfile.TemporaryDirectory(prefix="qlm-doctor-") as folder:
        server = EmbeddedServer(folder)
        url = await server.start()
        try:
            await _copy(settings, url)
            copy = settings.model_copy(update={"url": url})
            await _examined(copy, mend=True)
            return await _examined(copy, mend=False)
        finally:
            await server.stop()


async def _copy(settings: QueueSettings, url: str) -> None:
    """Raises ConfigError where the server's data is of a version that the embedded server cannot read."""
    pattern = "".join(f"\\{letter}" if letter in "[]*?\\" else letter for letter in Keys(settings.name).prefix) + ":*"
    source = await ServerAddress(settings.url, Keys(settings.name).prefix, settings.call_timeout_s).client()
    target = redis.Redis.from_url(url)
    async with source, target:
        async for name in source.scan_iter(match=pattern, count=SCAN_COUNT):
            value, ttl_ms = await source.dump(name), await source.pttl(name)
            if value is not None:
                try:
                    await target.restore(name, max(0, ttl_ms), value, replace=True)
                except redis.ResponseError as error:
                    raise ConfigError(f"the queue cannot be copied ({error}); --no-copy repairs it without a try") from error
