"""The agent's own record of the runs in its engine processes, and their unread output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from qlm_agent.engines.port import EngineFailure, EngineOutput, EngineRequest, FailureKind, FinishReason
from qlm_agent.engines.vllm.process.frames import Frame
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES


@dataclass(slots=True)
class HeldEngineRun:
    """A run of a model. `sent`: its process has it; `offloaded`: it is off the GPU, or on the way there."""

    request: EngineRequest
    sent: bool = False
    offloaded: bool = False


class EngineRuns:
    """All runs of an engine. Output of a run that is not read yet becomes one."""

    def __init__(self) -> None:
        self._runs: dict[str, HeldEngineRun] = {}
        self._unread: dict[str, EngineOutput] = {}
        self.news = asyncio.Event()

    def get(self, run_id: str) -> HeldEngineRun | None:
        return self._runs.get(run_id)

    def add(self, request: EngineRequest, *, sent: bool) -> None:
        self._runs[request.run_id] = HeldEngineRun(request, sent)

    def of(self, model: str, *, offloaded: bool | None = None) -> list[HeldEngineRun]:
        """Runs of a model, in the order of addition; `offloaded`: only those that are, or are not."""
        return [run for run in self._runs.values() if run.request.model == model and offloaded in (None, run.offloaded)]

    @property
    def offloaded(self) -> int:
        return sum(run.offloaded for run in self._runs.values())

    def drop(self, run_ids: Iterable[str]) -> list[HeldEngineRun]:
        """Forgets runs and their unread output; returns the known ones."""
        dropped: list[HeldEngineRun] = []
        for run_id in run_ids:
            self._unread.pop(run_id, None)
            run = self._runs.pop(run_id, None)
            if run is not None:
                dropped.append(run)
        return dropped

    def clear(self) -> None:
        self._runs.clear()
        self._unread.clear()

    def fail(self, run_id: str, kind: FailureKind, message: str) -> None:
        """Ends a run by a failure; its earlier output is reported too."""
        now_s = time.monotonic()
        self._runs.pop(run_id, None)
        self._add_output(EngineOutput(run_id, b"", now_s, now_s, now_s, failure=EngineFailure(kind=kind, message=message)))

    def take(self, frame: Frame) -> bool:
        """Takes a frame of output; returns whether it has tokens."""
        at = 0
        records = frame.head.get("logprobs", ())
        records_at = TOKEN_BYTES * sum(row[1] for row in frame.head["made"]) if records else 0
        made = False
        for number, row in enumerate(frame.head["made"]):
            run_id, count, started_s, first_s, last_s, cached_tokens = row[:6]
            ids = frame.body[at : at + count * TOKEN_BYTES]
            at += count * TOKEN_BYTES
            begin, records_at = records_at, records_at + (records[number] if records else 0)
            if run_id not in self._runs:
                continue
            made |= count > 0
            logprobs = frame.body[begin:records_at]
            output = EngineOutput(run_id, ids, started_s, first_s, last_s, logprobs=logprobs, cached_tokens=cached_tokens)
            if len(row) > 6:
                finish, failure, message = row[6:]
                output.finish = FinishReason(finish) if finish else None
                output.failure = EngineFailure(kind=FailureKind(failure), message=message) if failure else None
                del self._runs[run_id]
            self._add_output(output)
        return made

    def read(self) -> list[EngineOutput]:
        """All output that was not read yet."""
        made, self._unread = list(self._unread.values()), {}
        self.news.clear()
        return made

    def _add_output(self, output: EngineOutput) -> None:
        waiting = self._unread.get(output.run_id)
        if waiting is None:
            self._unread[output.run_id] = output
        else:
            waiting.extend(output)
        self.news.set()
