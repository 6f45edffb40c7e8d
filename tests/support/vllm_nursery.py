"""vLLM imported once for all tests of a process: the template of each engine under test is forked from one that has it.

Run as a program it is that process: it forks a template for each pair of a socket and a pipe that it is sent.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from typing import Any

from qlm_agent.engines.vllm.plans import environment
from qlm_agent.engines.vllm.process.main import die_with, hello, run_template
from qlm_agent.engines.vllm.process.template import ENVIRONMENT, Template, TemplateProcess
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_process.temporary_folder import TemporaryFolder


class QuickTemplate(Template):
    """A template whose import of vLLM is shared with the others. Its processes have the environment of default settings. `like_gpus`: vLLM
    for CPUs schedules asynchronously where configured to, and forks its own processes."""

    def __init__(self, *, like_gpus: bool = False) -> None:
        super().__init__("", {}, 300.0)
        self._like_gpus = like_gpus

    def launch(self, control: socket.socket) -> TemplateProcess:
        read, write = os.pipe()
        socket.send_fds(_nursery(self._like_gpus), [b"T"], [control.fileno(), write])
        os.close(write)
        return TemplateProcess(os.fdopen(read, "rb"), lambda: None)  # it ends with its socket


@cache
def _nursery(like_gpus: bool) -> socket.socket:
    ours, theirs = socket.socketpair()
    folder = TemporaryFolder("nursery")
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno()), str(os.getpid()), "like_gpus" if like_gpus else ""],
        env={
            **os.environ,
            **ENVIRONMENT,
            **environment(VllmSettings()),
            **folder.environment,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()

    def end() -> None:
        process.kill()
        process.wait()
        folder.remove()

    atexit.register(end)
    return ours


def schedule_and_fork_like_gpus() -> None:
    from vllm.platforms.cpu import CpuPlatform

    plain = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        asynchronous = scheduler.async_scheduling
        plain(vllm_config)
        scheduler.async_scheduling = asynchronous
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # two seconds instead of fifteen

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def main(descriptor: int, parent: int, like_gpus: bool) -> None:
    die_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    hello()
    if like_gpus:
        schedule_and_fork_like_gpus()
    orders = socket.socket(fileno=descriptor)
    nursery = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, 1, 2)
        if not data:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            die_with(nursery)
            os.dup2(descriptors[1], 2)
            run_template(socket.socket(fileno=descriptors[0]))
            os._exit(0)
        for each in descriptors:
            os.close(each)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3]))
