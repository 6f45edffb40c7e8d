"""A client that is open across a fork: a clear error in the child, and nothing happens to the parent's."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from .gateway_rig import MODEL, Rig

SCRIPT = """
import asyncio, os, sys
import qlm

address, model, how, call = sys.argv[1:]
client = qlm.Client(address)
client.models()
stream = client.generate(model, "hi", max_tokens=5)
stream.wait_accepted()

CALLS = {
    "submit": lambda: client.submit(model, "hi"),
    "result": lambda: client.result("r", 1.0),
    "stream": lambda: next(stream),
    "generate": lambda: client.generate(model, "hi"),
    "async": lambda: asyncio.run(client._client.models()),
}

def child():
    try:
        CALLS[call]()
    except qlm.errors.InternalError as error:
        print(error.message, flush=True)
    stream.close()
    client.close()

if how == "fork":
    pid = os.fork()
    if not pid:
        child()
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode)
print(len(client.models()) > 0, client.submit(model, "the parent goes on").state)
client.close()
"""


@pytest.mark.parametrize(
    ("how", "call"), [("fork", "submit"), ("fork", "stream"), ("fork", "generate"), ("fork", "async"), ("multiprocessing", "result")]
)
async def test_a_forked_child_is_refused(rig: Rig, how: str, call: str) -> None:
    gateway = await rig.gateway()
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", SCRIPT, gateway.address, MODEL, how, call],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines == [
        "the client was made in another process: make one in each process, after the fork",
        "7" if how == "fork" else "0",
        "True accepted",
    ], done.stdout + done.stderr
