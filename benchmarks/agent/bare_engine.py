"""vLLM alone in a process of its own: it gets requests all at once, and reports its time."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from benchmarks.agent.own_agent import GreedyRequest
from benchmarks.agent.stepped_engine import EnginePlan, SteppedEngine
from qlm_agent.engines.vllm.plans import environment
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_core.vocabulary.errors import QlmError

STOP_S = 20.0


class BareEngineEnded(QlmError):
    """Its process ended by itself."""

    default_reason = "ENGINE_FAILURE"


class BareEngine:
    """`start` returns when the engine is ready; `stop` is safe twice. Calls block."""

    def __init__(self, plan: EnginePlan) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, self._theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(plan, self._theirs), daemon=True)

    def start(self) -> None:
        self._process.start()
        self._theirs.close()
        self._answer()

    def seconds_for(self, requests: Sequence[GreedyRequest]) -> float:
        """Seconds from the first request's submission to the last one's last token."""
        self._ours.send([(list(each.prompt), each.output_tokens) for each in requests])
        return self._answer()

    def stop(self) -> None:
        if self._process.is_alive():
            self._ours.send(None)
            self._process.join(STOP_S)
            self._process.kill()

    def _answer(self) -> float:
        try:
            answer: float = self._ours.recv()
        except EOFError:
            raise BareEngineEnded("the process of vLLM by itself has ended") from None
        return answer


def _serve(plan: EnginePlan, channel: Connection) -> None:
    os.environ.update(environment(VllmSettings()))  # the environment of an agent's engine
    engine = SteppedEngine(plan)
    channel.send(0.0)
    number = 0
    while (requests := channel.recv()) is not None:
        engine.clear()
        began_s = time.perf_counter()
        for prompt, output_tokens in requests:
            number += 1
            engine.add(f"bare-{number}", prompt, output_tokens)
        engine.until(lambda: not engine.running)
        channel.send(time.perf_counter() - began_s)
