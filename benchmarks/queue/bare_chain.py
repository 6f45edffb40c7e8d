"""The bare chain: the messages of a request over the same hops in as many processes (gRPC, accept, planner, agent, frames, gRPC), with no
policy, no engine, and no record but what the next hop reads. Figures of latency are stated beside it: it is the floor of these libraries.

Each part is a worker (`worker`), which reports "ready" and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any, cast

import grpc
import grpc.aio

from benchmarks.queue.grpc_load import GENERATE
from benchmarks.queue.worker import Report, Settings, report_event, run_worker
from qlm.api.v1.gateway_pb2 import Accepted, StreamResponse, TokenChunk
from qlm.api.v1.request_pb2 import FINISH_REASON_LENGTH, REQUEST_STATE_COMPLETED, Result, Usage
from qlm_core.vocabulary.errors import Unavailable
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.address import ServerAddress
from qlm_queue.redis.link import RedisLink
from qlm_queue.redis.scripts import Library, library_source

QUEUE, GROUP, CONTROL, FRAMES = "{bare}:queue", "{bare}:group", "{bare}:ctl", "{bare}:frames"
PLANNER = "planner"
BLOCK_S = 5.0
READ_MAX = 500
PULL_MAX = 100
CALL_TIMEOUT_S = 5.0
START_TIMEOUT_S = 30.0
LIFE_MAX_S = 600.0
PARTS = ("bare_gateway", "bare_planner", "bare_agent")

# The writes of `place`, `pull`, `emit` and `complete` that another hop waits for, or that have to last.
PLACE = """
redis.call('ZADD', KEYS[2], unpack(ARGV))
for at = 2, #ARGV, 2 do redis.call('XACK', KEYS[1], 'planner', ARGV[at]) end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'k', 'wake')
"""
PULL = """
local pulled = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, ARGV[1])) do
  redis.call('ZREM', KEYS[2], id)
  pulled[#pulled + 1] = { id, redis.call('XRANGE', KEYS[1], id, id)[1][2] }
end
return pulled
"""
EMIT = """
for at = 3, #ARGV do redis.call('APPEND', KEYS[1] .. ':progress:' .. ARGV[at], ARGV[1]) end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'f', ARGV[1], 'i', ARGV[2])
"""
COMPLETE = """
for at = 3, #ARGV do
  redis.call('SET', KEYS[1] .. ':result:' .. ARGV[at], ARGV[1], 'PX', 3600000)
  redis.call('DEL', KEYS[1] .. ':progress:' .. ARGV[at])
  redis.call('XDEL', KEYS[1], ARGV[at])
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'f', ARGV[1], 'i', ARGV[2])
"""

FIRST = StreamResponse(tokens=TokenChunk(token_ids=[1000], text="a")).SerializeToString()
LAST = StreamResponse(
    tokens=TokenChunk(offset=1, token_ids=range(1000, 1015), text="a" * 45),
    result=Result(state=REQUEST_STATE_COMPLETED, finish_reason=FINISH_REASON_LENGTH, usage=Usage(prompt_tokens=64, output_tokens=16)),
).SerializeToString()


@asynccontextmanager
async def bare_chain(folder: Path) -> AsyncIterator[str]:
    """Runs the chain on a server of its own; yields the address for the load generator. Raises Unavailable where it does not start."""
    rmtree(folder, ignore_errors=True)
    server = EmbeddedServer(folder)
    url = await server.start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ready = asyncio.Semaphore(0)
    settings = {"url": url, "address": address}
    tasks = [asyncio.create_task(run_worker(part, settings, lambda _: ready.release(), timeout_s=LIFE_MAX_S)) for part in PARTS]
    try:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for _ in tasks:
                    await ready.acquire()
        except TimeoutError:
            raise Unavailable(f"the bare chain did not start within {START_TIMEOUT_S:g} s") from None
        yield address
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop()
        rmtree(folder, ignore_errors=True)


async def _run(settings: Settings, part: Callable[[RedisLink], Awaitable[None]]) -> Report:
    link = RedisLink(ServerAddress(settings["url"], QUEUE, CALL_TIMEOUT_S), Library(library_source()), CALL_TIMEOUT_S)
    await link.start()
    try:
        await part(link)
    finally:
        await link.stop()
    return {}


async def gateway(settings: Settings) -> Report:
    """Takes calls at `address`: accepts, and streams what the frames say."""
    streams: dict[bytes, asyncio.Queue[bytes]] = {}
    numbers = itertools.count()

    async def serve(link: RedisLink) -> None:
        async def generate(request: bytes, context: Any) -> None:
            number = b"%d" % next(numbers)
            stream: asyncio.Queue[bytes] = asyncio.Queue()
            streams[number] = stream
            queue_id = await link.ask("XADD", QUEUE, "*", "r", request, "i", number)
            await context.write(StreamResponse(accepted=Accepted(queue_id=queue_id.decode())).SerializeToString())
            for _ in range(2):
                await context.write(await stream.get())
            del streams[number]

        server = grpc.aio.server()
        _, service, method = GENERATE.split("/")
        handlers = {method: grpc.unary_stream_rpc_method_handler(cast(Any, generate))}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        server.add_insecure_port(settings["address"])
        await server.start()
        report_event("ready")
        after = "0"
        while True:
            for entry_id, fields in await link.read_streams(FRAMES, after, BLOCK_S, READ_MAX):
                after = entry_id.decode()
                for number in fields[b"i"].split():
                    streams[number].put_nowait(fields[b"f"])

    return await _run(settings, serve)


async def planner(settings: Settings) -> Report:
    """Puts each request into the one group, and wakes the agent."""

    async def place(link: RedisLink) -> None:
        await link.ask("XGROUP", "CREATE", QUEUE, PLANNER, "0", "MKSTREAM")
        report_event("ready")
        numbers = itertools.count()
        while True:
            entries = await link.read_group(QUEUE, PLANNER, "leader", BLOCK_S, READ_MAX)
            members = [part for entry_id, _ in entries for part in (next(numbers), entry_id)]
            if members:
                await link.ask("EVAL", PLACE, 3, QUEUE, GROUP, CONTROL, *members)

    return await _run(settings, place)


async def agent(settings: Settings) -> Report:
    """Pulls at each wake-up, and writes a first and a last frame."""

    async def pull(link: RedisLink) -> None:
        report_event("ready")
        after = "0"
        while True:
            for entry_id, _ in await link.read_streams(CONTROL, after, BLOCK_S, READ_MAX):
                after = entry_id.decode()
            while pulled := await link.ask("EVAL", PULL, 2, QUEUE, GROUP, PULL_MAX - 1):
                ids, numbers = [queue_id for queue_id, _ in pulled], b" ".join(fields[3] for _, fields in pulled)
                await link.ask("EVAL", EMIT, 2, QUEUE, FRAMES, FIRST, numbers, *ids)
                await link.ask("EVAL", COMPLETE, 2, QUEUE, FRAMES, LAST, numbers, *ids)
                if len(ids) < PULL_MAX:
                    break

    return await _run(settings, pull)
