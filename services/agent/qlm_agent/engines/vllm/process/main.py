"""`python -m qlm_agent.engines.vllm.process.main FD PARENT`: imports vLLM once, and forks an engine process for each socket sent to it.

So a start costs a second or two instead of the import's six, and engine processes share the imported memory. All end with the agent: the
template at the end of its socket or with its parent, its children with it and at the end of their own.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from qlm_agent.engines.vllm.process.frames import Frame
from qlm_agent.engines.vllm.process.loop import ChildLoop
from qlm_agent.engines.vllm.process.versions import sources_digest
from qlm_agent.engines.vllm.runner.port import LoadPlan, Runner
from qlm_process.die_with_parent import on_parents_death

REAP_S = 0.2
"""How often ended children are reaped."""

KEPT_DESCRIPTORS = 3
"""Standard input, output and error."""


def hello() -> Frame:
    """The offer of this process, or why it has none."""
    try:
        import torch
        import vllm

        preload()
    except Exception as error:  # any error of an import of this size
        return Frame({"t": "fatal", "message": f"vllm cannot be imported by {sys.executable}: {type(error).__name__}: {error}"})
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    versions = {"vllm": str(vllm.__version__), "torch": str(torch.__version__), "sources": sources_digest()}
    return Frame({"t": "hello", **versions, "device": device, "pid": os.getpid()})


def preload() -> None:
    """Imports the modules of every engine. Nothing here starts threads or touches a device."""
    import vllm.model_executor.models.llama
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine  # noqa: F401


def run_template(control: socket.socket) -> None:
    """Forks until the agent closes the socket."""
    said = hello()
    control.sendall(said.encoded())
    if said.head["t"] == "fatal":
        return
    while True:
        ready, _, _ = select.select([control], [], [], REAP_S)
        if ready:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            fork_engine(control, descriptors[0])
        reap(control)


def fork_engine(control: socket.socket, descriptor: int) -> None:
    template = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        die_with(template)
        engine_process(socket.socket(fileno=descriptor))
    os.close(descriptor)


def engine_process(channel: socket.socket) -> NoReturn:
    """One engine, until its socket ends."""
    code = 1
    try:
        channel.sendall(Frame({"t": "hello", "pid": os.getpid()}).encoded())
        ChildLoop(channel, make_runner).run()
        code = 0
    except BaseException as error:  # the last report of the process
        traceback.print_exc()
        try:
            channel.sendall(Frame({"t": "fatal", "message": f"{type(error).__name__}: {error}"}).encoded())
        except OSError:
            code = 2
    finally:
        os._exit(code)


def make_runner(plan: LoadPlan) -> Runner:
    """Builds vLLM."""
    if plan.engine.get("tensor_parallel_size", 1) > 1:
        guard_group()  # there will be processes of vLLM's own
    from qlm_agent.engines.vllm.runner.llm_engine import LlmEngineRunner

    return LlmEngineRunner(plan)


def reap(control: socket.socket) -> None:
    """Reports how children ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        control.sendall(Frame({"t": "exit", "pid": pid, "code": os.waitstatus_to_exitcode(status)}).encoded())


# The end of processes --------------------------------------------------------------------------------------------------


def die_with(parent: int) -> None:
    """Has the kernel kill this process with its parent; at once if the parent has changed."""
    on_parents_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def guard_group() -> None:
    """Makes this process the leader of a group, and starts a small process that kills the group when this one ends, in any way: vLLM's own
    processes do not notice that they are orphans. Call it from the main thread, before there are others."""
    leader = os.getpid()
    os.setpgid(0, 0)
    if os.fork():
        return
    os.closerange(KEPT_DESCRIPTORS, os.sysconf("SC_OPEN_MAX"))  # above all the socket, whose end the agent awaits
    signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(leader, signal.SIGKILL))
    on_parents_death(signal.SIGTERM)
    if os.getppid() != leader:
        os.killpg(leader, signal.SIGKILL)
    while True:
        signal.pause()


def main(argv: Sequence[str]) -> int:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group, and the agent drains first
    die_with(int(argv[1]))
    run_template(socket.socket(fileno=int(argv[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
