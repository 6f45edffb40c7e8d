"""Every RPC of planner, estimator and agent against hostile requests: a valid answer, or a canonical error with a reason that changed
nothing. The gateway's are in `test_gateway_hostile`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from qlm.api.v1 import agent_pb2, estimator_pb2, instance_pb2, planner_pb2
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_process.wire import profile as profile_wire
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from queue_dump import QueueDump
from queue_dump_redis import dump_redis

from . import estimator_rig
from .hostile_calls import call, call_with_all
from .test_agent_service.rig import QUEUE, Rig
from .test_planner_service.cluster import Cluster, until

PLANNER = planner_pb2.DESCRIPTOR.services_by_name["Planner"]
ESTIMATOR = estimator_pb2.DESCRIPTOR.services_by_name["Estimator"]
AGENT = agent_pb2.DESCRIPTOR.services_by_name["Agent"]
EMPTY_REQUESTS_REFUSED_MIN = 5
"""Only bytes that are no message can be refused of a request without fields."""


@dataclass
class Served:
    """A service that answers at `address`. `good`: requests that it answers well, by RPC; the rest have no fields."""

    address: str
    dump: Callable[[], Awaitable[QueueDump]]
    good: dict[str, Message] = field(default_factory=dict)

    def request(self, method: MethodDescriptor) -> Message:
        if method.name in self.good:
            return self.good[method.name]
        assert not method.input_type.fields, f"{method.name} needs a good request here"
        return GetMessageClass(method.input_type)()


@asynccontextmanager
async def planner(server: EmbeddedServer, folder: Path) -> AsyncIterator[Served]:
    """A leader with one instance and one waiting request."""
    queue = RedisQueue(server.url, "test")
    await queue.start()
    cluster = Cluster(url=server.url, folder=folder, queue=queue)
    incarnation = await cluster.join("a")
    async with cluster.planner() as shell:
        await cluster.submit("mistral-7b")
        await until(cluster.all_placed, "the request is placed")
        instance = instance_pb2.Instance(
            name="a", incarnation=incarnation, gpu="A100-80GB", n_gpu=1, engine="simulated", models=["mistral-7b"],
            address="127.0.0.1:1", time_scale=1.0, active_model="mistral-7b", batch_max=256,
        )  # fmt: skip
        load = instance_pb2.InstanceLoad(active_model="mistral-7b", warm_models=["vicuna-13b"], running=1)
        good: dict[str, Message] = {
            "RegisterInstance": planner_pb2.RegisterInstanceRequest(instance=instance),
            "Heartbeat": planner_pb2.HeartbeatRequest(incarnation=incarnation, load=load),
            "Replan": planner_pb2.ReplanRequest(why="a test"),
        }
        try:
            yield Served(shell.address, partial(dump_redis, queue), good)
        finally:
            await queue.stop()


@asynccontextmanager
async def estimator(server: EmbeddedServer, folder: Path) -> AsyncIterator[Served]:
    """A leader that knows one instance."""
    rig = estimator_rig.Rig(RedisQueue(server.url))
    await rig.start()
    # Making twenty thousand messages keeps this process, and so its estimator, from renewing for a while.
    estimator = estimator_rig.Estimator(server.url, lease_ttl_s=30.0)
    await estimator.start()
    good: dict[str, Message] = {
        "GetOutcomes": estimator_pb2.GetOutcomesRequest(window_s=60.0),
        "ImportProfiles": estimator_pb2.ImportProfilesRequest(profiles=profile_wire.to_proto(BROUGHT)),
    }
    try:
        yield Served(estimator.address, partial(dump_redis, rig.queue), good)
    finally:
        await estimator.stop()
        await rig.queue.stop()


@asynccontextmanager
async def agent(server: EmbeddedServer, folder: Path) -> AsyncIterator[Served]:
    """An agent with two models that has served a request."""
    rig = Rig(server.url)
    await rig.start()
    running = await rig.agent()
    names = await rig.accept(1)
    await rig.place(names)
    await rig.results_of(names)
    queue = RedisQueue(server.url, QUEUE)
    await queue.start()
    good: dict[str, Message] = {
        "Drain": agent_pb2.DrainRequest(finish_s=1.0),
        "LoadModel": agent_pb2.LoadModelRequest(model="n"),
        "UnloadModel": agent_pb2.UnloadModelRequest(model="n"),
    }
    try:
        yield Served(running.address, partial(dump_redis, queue), good)
    finally:
        await queue.stop()
        await rig.stop()


SHIPPED = next(row for row in shipped_snapshot().hardware if (row.gpu, row.model) == ("A100-80GB", "Mistral-7B"))
BROUGHT = ProfileSnapshot(version=0, made_s=0.0, hardware=(replace(SHIPPED, gpu="L4", kv_capacity_tokens=20_000, origin="measured"),))

Opener = Callable[[EmbeddedServer, Path], AbstractAsyncContextManager[Served]]
OPENERS: tuple[tuple[ServiceDescriptor, Opener], ...] = ((PLANNER, planner), (ESTIMATOR, estimator), (AGENT, agent))
CASES = [pytest.param(opener, method, id=f"{service.name}-{method.name}") for service, opener in OPENERS for method in service.methods]


@pytest.mark.parametrize(("opener", "method"), CASES)
async def test_hostile_requests_are_answered_or_refused_and_change_nothing(
    server: EmbeddedServer, tmp_path: Path, opener: Opener, method: MethodDescriptor
) -> None:
    async with opener(server, tmp_path) as served, grpc.aio.insecure_channel(served.address) as channel:
        good = served.request(method)
        tally = await call_with_all(channel, method, good, served.dump)
        assert tally.refused > EMPTY_REQUESTS_REFUSED_MIN
        assert tally.answered > 0
        assert await call(channel, method, good.SerializeToString()) is not None, "it serves after all of it"
