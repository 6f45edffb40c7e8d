"""The vllm engine: the engine port over engine processes. This process never imports vllm or torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import structlog

from qlm_agent.engines.port import EngineOutput, EngineRequest, EngineStats, FailureKind, ModelLoadFailed, Sampling, TextPrompt, Tier
from qlm_agent.engines.vllm.engine_runs import EngineRuns
from qlm_agent.engines.vllm.placement import Placement
from qlm_agent.engines.vllm.plans import VllmModel, environment
from qlm_agent.engines.vllm.process.child import CallFailed, Child, ChildEnded
from qlm_agent.engines.vllm.process.frames import BrokenFrame, Frame
from qlm_agent.engines.vllm.process.template import Template
from qlm_agent.engines.vllm.process.versions import check_device
from qlm_agent.engines.vllm.runner.port import bytes_of
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import ConfigError, QlmError

RESTART_MIN_S = 0.5
RESTART_MAX_S = 30.0
"""Pauses before the second and later restarts of a process double up to this."""


class EngineLost(QlmError):
    """The active model's process could not be restarted: the agent cannot continue."""

    default_reason = "ENGINE_FAILURE"


class VllmEngine:
    """See `qlm_agent.engines.port.Engine`. A process that dies with runs fails them as BROKEN; the active model's process is restarted, and
    later runs wait for it. `outputs` raises EngineLost after too many attempts in a row."""

    def __init__(
        self, models: Mapping[str, VllmModel], settings: VllmSettings, *, batch_max: int, n_gpu: int = 1, template: Template | None = None
    ) -> None:
        self._settings = settings
        self._batch_max = batch_max
        self._template = template or Template(settings.python, environment(settings), settings.load_timeout_s)
        self._runs = EngineRuns()
        self._placement = Placement(
            models, settings, self._template, self._runs, batch_max=batch_max, n_gpu=n_gpu, on_step=self._stepped, on_end=self._ended
        )
        self._restart: asyncio.Task[None] | None = None
        self._restarts = 0  # in a row, without output between them
        self._why = ""  # it ended, or could not be started, the last time
        self._lost = ""
        self._preemptions = 0  # in ended processes
        self._seen: dict[Child, int] = {}
        self._rooms: dict[str, tuple[int, int]] = {}  # for KV, by model: on the GPU and in host memory

    @property
    def text_output(self) -> bool:
        return False

    async def start(self) -> None:
        """Raises ConfigError if vLLM is missing, too old or built for another device."""
        await self._template.start()
        try:
            check_device(self._template.device, self._settings.device)
        except ConfigError:
            await self._template.stop()
            raise

    async def stop(self) -> None:
        await self._end_restart()
        self._runs.clear()
        await self._placement.stop()
        await self._template.stop()

    # Models -----------------------------------------------------------------------------------------------------------

    def tier(self, model: str) -> Tier:
        return self._placement.tier(model)

    async def load_model(self, model: str, tier: Tier) -> float:
        if tier is Tier.ACTIVE and self._placement.active != model:
            await self._end_restart()
        try:
            took_s = await self._placement.load(model, tier)
        finally:
            self._begin_restart_if_dead()
        for ended in [each for each in self._seen if each.ended]:
            self._preemptions += self._seen.pop(ended)
        child = self._placement.child(model)
        if child is not None:
            self._rooms[model] = (child.stats.get("kv_capacity_tokens", 0), child.stats.get("host_kv_capacity_tokens", 0))
            self._send(child)  # the runs that waited for its process
        return took_s

    # Runs -------------------------------------------------------------------------------------------------------------

    async def add(self, request: EngineRequest) -> None:
        if not self._placement.active or request.model != self._placement.active:
            self._runs.fail(request.run_id, FailureKind.AWAY, f"model {request.model} is not active")
            return
        self._runs.add(request, sent=False)
        child = self._placement.child(request.model)
        if child is not None:
            self._send(child)

    async def abort(self, run_ids: Sequence[str]) -> None:
        by_model: dict[str, list[str]] = {}
        for run in self._runs.drop(run_ids):
            if run.sent:
                by_model.setdefault(run.request.model, []).append(run.request.run_id)
        for model, aborted in by_model.items():
            child = self._placement.child(model)
            if child is not None:
                self._watch(child)
                with suppress(ChildEnded, CallFailed):
                    await child.call("abort", runs=aborted)
        await self._placement.tidy()

    async def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        return await self._move(run_ids, offload=True)

    async def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        return await self._move(run_ids, offload=False)

    async def _move(self, run_ids: Sequence[str], *, offload: bool) -> Sequence[str]:
        """From this call on a run counts as moved, unless the move fails."""
        child = self._placement.child(self._placement.active)
        runs = {run_id: run for run_id in run_ids if (run := self._runs.get(run_id)) is not None}
        runs = {run_id: run for run_id, run in runs.items() if run.sent and run.offloaded is not offload}
        runs = {run_id: run for run_id, run in runs.items() if run.request.model == self._placement.active}
        if child is None or not runs:
            return []
        for run in runs.values():
            run.offloaded = offload
        moved: list[str] = []
        try:
            with suppress(ChildEnded, CallFailed):
                moved = (await child.call("offload" if offload else "restore", runs=list(runs)))["runs"]
        finally:
            for run_id, run in runs.items():
                run.offloaded = offload == (run_id in moved)
            self._watch(child)
        return [run_id for run_id in moved if self._runs.get(run_id) is not None]

    async def outputs(self) -> Sequence[EngineOutput]:
        while True:
            made = self._runs.read()
            if made:
                return made
            if self._lost:
                raise EngineLost(self._lost)
            await self._runs.news.wait()

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        self._placement.paused = paused
        child = self._placement.child(self._placement.active)
        if child is not None:
            self._watch(child)
            with suppress(ChildEnded, CallFailed):
                await child.call("pause" if paused else "resume")

    def stats(self) -> EngineStats:
        placement = self._placement
        host = placement.host
        child = placement.child(placement.active)
        stats = {} if child is None else child.stats
        kv_capacity_tokens, host_kv_capacity_tokens = self._rooms.get(placement.active, (0, 0))
        on_gpu = len(self._runs.of(placement.active, offloaded=False)) if placement.active else 0
        running = min(on_gpu, stats.get("running", 0))
        return EngineStats(
            active_model=placement.active,
            warm_models=tuple(model for model in host.models if model != placement.active),
            running=running,
            waiting=on_gpu - running,
            batch_max=self._batch_max,
            kv_used_tokens=stats.get("kv_used_tokens", 0),
            kv_capacity_tokens=kv_capacity_tokens,
            preemptions=self._preemptions + sum(self._seen.values()),
            offloaded=self._runs.offloaded,
            host_kv_used_tokens=sum(each.stats.get("host_kv_used_tokens", 0) for each in placement.children),
            host_kv_capacity_tokens=host_kv_capacity_tokens,
            host_memory_used_bytes=round(host.used_gb * 1e9) + sum(_host_kv_bytes(each, "used") for each in placement.children),
            host_memory_capacity_bytes=round(host.budget_gb * 1e9) + sum(_host_kv_bytes(each, "capacity") for each in placement.children),
        )

    # Processes --------------------------------------------------------------------------------------------------------

    def _send(self, child: Child) -> None:
        """Gives a process the runs of its model that it does not have."""
        for run in self._runs.of(child.model):
            if not run.sent:
                run.sent = True
                try:
                    child.send(_add_frame(run.request))
                except BrokenFrame as error:
                    self._runs.fail(run.request.run_id, FailureKind.REFUSED, str(error))
        self._watch(child)

    def _watch(self, child: Child) -> None:
        child.expect_steps(not self._placement.paused and bool(self._runs.of(child.model, offloaded=False)))

    def _stepped(self, child: Child, frame: Frame) -> None:
        if self._runs.take(frame):
            self._restarts = 0
        self._seen[child] = child.stats.get("preemptions", 0)
        self._watch(child)

    def _ended(self, child: Child, why: str) -> None:
        self._preemptions += self._seen.pop(child, 0)
        failed = self._runs.of(child.model)
        structlog.get_logger().error("vllm_ended", model=child.model, why=why, runs=len(failed), said=self._template.last_lines[-3:])
        for run in failed:
            if run.sent:
                self._runs.fail(run.request.run_id, FailureKind.BROKEN, why)
        if child.model == self._placement.active:
            self._why = why
        self._begin_restart_if_dead()

    def _begin_restart_if_dead(self) -> None:
        model = self._placement.active
        if model and self._placement.child(model) is None and (self._restart is None or self._restart.done()) and not self._lost:
            self._restart = asyncio.get_running_loop().create_task(self._start_again(model), name="vllm-restart")
            self._restart.add_done_callback(self._restart_ended)

    def _restart_ended(self, task: asyncio.Task[None]) -> None:
        """An unforeseen error of a restart loses the engine, as too many restarts do."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lost = f"model {self._placement.active}: its engine process could not be started again: {error!r}"
            self._runs.news.set()

    async def _start_again(self, model: str) -> None:
        while self._placement.active == model and self._placement.child(model) is None:
            if self._restarts >= self._settings.restarts_max:
                # An attempt that ended without an error and without output counts too: a request that kills every process is one.
                many = f"{self._restarts} times in a row could not be started, or ended before any output"
                self._lost = f"model {model}: its engine process {many}; the last time: {self._why}"
                self._runs.news.set()
                return
            if self._restarts:
                await asyncio.sleep(min(RESTART_MAX_S, RESTART_MIN_S * 2 ** (self._restarts - 1)))
            self._restarts += 1
            try:
                await self._placement.revive(model)
            except (ModelLoadFailed, QlmError) as error:
                self._why = error.message
                structlog.get_logger().error("vllm_not_restarted", model=model, attempt=self._restarts, error=error.message)
                continue
            child = self._placement.child(model)
            if child is not None:
                structlog.get_logger().warning("vllm_restarted", model=model, attempt=self._restarts, pid=child.pid)
                self._send(child)

    async def _end_restart(self) -> None:
        task, self._restart = self._restart, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def _host_kv_bytes(child: Child, which: str) -> int:
    tokens: int = child.stats.get(f"host_kv_{which}_tokens", 0)
    return tokens * int(child.stats.get("kv_bytes_per_token", 0))


def sampling_document(sampling: Sampling) -> dict[str, Any]:
    """The parameters that are not the defaults."""
    plain = asdict(Sampling())
    return {name: value for name, value in asdict(sampling).items() if value != plain[name]}


def _add_frame(request: EngineRequest) -> Frame:
    policy: dict[str, object] = {"deadline_s": request.deadline_s, "priority": request.priority, "quantiles": request.length_quantiles}
    if request.arrival:
        policy["arrival"] = request.arrival
    head: dict[str, object] = {
        "op": "add",
        "run": request.run_id,
        "prompt": 0,
        "max": request.output_tokens_max,
        "sampling": sampling_document(request.sampling),
        "policy": policy,
    }
    body = b""
    match request.prompt:
        case TextPrompt():
            head["text"] = asdict(request.prompt)
        case ChatPrompt():
            head["chat"] = asdict(request.prompt)
        case _:
            body = bytes_of(request.prompt.ids)
            head["prompt"] = len(request.prompt.ids)
    return Frame(head, body + request.produced)
