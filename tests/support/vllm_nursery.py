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
from typing import Literal

from qlm_agent.engines.vllm.plans import environment
from qlm_agent.engines.vllm.process.main import hello, run_template
from qlm_agent.engines.vllm.process.process_exit import die_with
from qlm_agent.engines.vllm.process.template import ENVIRONMENT, Template, TemplateProcess
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_process.temporary_folder import TemporaryFolder


class QuickTemplate(Template):
    """A template whose import of vLLM is shared with those of the same runner. Its processes have the environment of default settings."""

    def __init__(self, runner: Literal["in_process", "async"] = "in_process") -> None:
        super().__init__("", {}, 300.0)
        self._runner: Literal["in_process", "async"] = runner

    def launch(self, control: socket.socket) -> TemplateProcess:
        read, write = os.pipe()
        socket.send_fds(_nursery(self._runner), [b"T"], [control.fileno(), write])
        os.close(write)
        return TemplateProcess(os.fdopen(read, "rb"), lambda: None)  # it ends with its socket


@cache
def _nursery(runner: Literal["in_process", "async"]) -> socket.socket:
    ours, theirs = socket.socketpair()
    folder = TemporaryFolder("nursery")
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
        env={
            **os.environ,
            **ENVIRONMENT,
            **environment(VllmSettings(runner=runner)),
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


def main(descriptor: int, parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    hello()
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
    main(int(sys.argv[1]), int(sys.argv[2]))
