"""The life of an engine process: frames in, steps, frames out, in one thread."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from qlm_agent.engines.port import FailureKind, TextPrompt
from qlm_agent.engines.vllm.process.frames import Frame, FrameReader
from qlm_agent.engines.vllm.runner.port import LoadPlan, Runner, RunOutput, RunPlan, bytes_of, ids_of
from qlm_agent.engines.vllm.runner.runs import Runs
from qlm_core.vocabulary.chat import ChatPrompt

READ_BYTES = 1 << 20

IDLE_CHECK_S = 0.5
"""How often an idle engine is checked for the end of a process of vLLM's own."""


class ChildLoop:
    """Serves one agent over `channel`. `make`: builds vLLM."""

    def __init__(self, channel: socket.socket, make: Callable[[LoadPlan], Runner]) -> None:
        self._channel = channel
        self._make = make
        self._reader = FrameReader()
        self._runner: Runner | None = None
        self._runs: Runs | None = None
        self._stopped = False
        self._moves: dict[int, list[str]] = {}  # call -> runs on their way to host memory

    def run(self) -> None:
        """Serves until the agent closes the channel, or sends stop. Raises vLLM's errors of a step, and VllmProcessEnded."""
        while not self._stopped:
            working = self._working
            for frame in self._receive(wait=not working):
                self._take(frame)
            if self._runner is not None:
                self._runner.check()
            if self._working and self._runs is not None:
                self._report(self._runs.step())  # even an empty step: it shows the agent that the process lives
            self._end_moves()
        if self._runner is not None:
            self._runner.close()

    @property
    def _working(self) -> bool:
        return not self._stopped and self._runner is not None and self._runner.busy

    def _receive(self, *, wait: bool) -> list[Frame]:
        ready, _, _ = select.select([self._channel], [], [], IDLE_CHECK_S if wait else 0.0)
        if not ready:
            return []
        data = self._channel.recv(READ_BYTES)
        if not data:
            self._stopped = True
            return []
        return self._reader.feed(data)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        head = frame.head
        if head["op"] == "add":
            self._add(head, frame.body)
            return
        answer: dict[str, Any] | None
        try:
            answer = self._answer(head)
        except Exception as error:  # any error of vLLM; the agent decides about this process
            answer = {"error": f"{type(error).__name__}: {error}"}
        if answer is not None:
            self._send(Frame({"t": "answer", "id": head["id"], **answer, **self._stats()}))

    def _answer(self, head: dict[str, Any]) -> dict[str, Any] | None:
        """None if the answer follows later."""
        if head["op"] == "load":
            plan = LoadPlan(**head["plan"])
            self._runner = self._make(plan)
            self._runs = Runs(self._runner, plan.context_tokens)
            return {"kv_limit_tokens": self._runner.kv_limit_tokens}
        assert self._runner is not None
        assert self._runs is not None
        match head["op"]:
            case "abort":
                self._runs.abort(head["runs"])
            case "pause" | "resume":
                self._runner.pause(head["op"] == "pause")
            case "offload":
                self._moves[head["id"]] = list(self._runner.offload(head["runs"]))
                return None
            case "restore":
                return {"runs": list(self._runner.restore(head["runs"]))}
            case "sleep":
                self._runner.sleep(head["level"])
            case "wake":
                self._runner.wake(head["level"])
            case "trim":
                self._runner.trim()
            case "reload":
                self._runner.reload(head["weights"])
            case "ping":
                pass
            case _:
                raise ValueError(f"unknown operation {head['op']}")
        return {}

    def _add(self, head: dict[str, Any], body: bytes) -> None:
        assert self._runner is not None
        assert self._runs is not None
        now_s = time.monotonic()
        prompt_bytes = 4 * head["prompt"]
        try:
            if "text" in head:
                prompt = self._runner.text_prompt(TextPrompt(**head["text"]))
            elif "chat" in head:
                prompt = self._runner.chat_prompt(ChatPrompt(**head["chat"]))
            else:
                prompt = ids_of(body[:prompt_bytes])
        except Exception as error:  # any error of a template
            self._report(
                [RunOutput(head["run"], [], now_s, now_s, now_s, failure=FailureKind.REFUSED.value, message=f"the prompt: {error}")]
            )
            return
        plan = RunPlan(
            run_id=head["run"],
            prompt=prompt,
            produced=ids_of(body[prompt_bytes:]),
            output_tokens_max=head["max"],
            sampling=head["sampling"],
            policy=head["policy"],
        )
        made = self._runs.add(now_s, plan)
        if made is not None:
            self._report([made])

    def _end_moves(self) -> None:
        """Answers completed offloads: none of their runs is on its way to host memory."""
        if not self._moves or self._runner is None or self._runs is None:
            return
        away, leaving = self._runner.offloaded(), self._runner.leaving()
        for call, run_ids in list(self._moves.items()):
            if not any(run_id in leaving and self._runs.knows(run_id) for run_id in run_ids):
                del self._moves[call]
                done = [run_id for run_id in run_ids if run_id in away]
                self._send(Frame({"t": "answer", "id": call, "runs": done, **self._stats()}))

    # Output -----------------------------------------------------------------------------------------------------------

    def _report(self, made: Sequence[RunOutput]) -> None:
        """One frame for all."""
        rows = [
            [each.run_id, len(each.tokens), each.started_s, each.first_s, each.last_s, each.cached_tokens]
            + ([each.finish, each.failure, each.message] if each.finish or each.failure else [])
            for each in made
        ]
        body = b"".join(bytes_of(each.tokens) for each in made)
        head: dict[str, Any] = {"t": "step", "made": rows, **self._stats()}
        if any(each.logprobs for each in made):
            head["logprobs"] = [len(each.logprobs) for each in made]
            body += b"".join(each.logprobs for each in made)
        self._send(Frame(head, body))

    def _stats(self) -> dict[str, Any]:
        return {} if self._runner is None else {"stats": asdict(self._runner.stats())}

    def _send(self, frame: Frame) -> None:
        self._channel.sendall(frame.encoded())
