"""The engine port over OpenAI-compatible servers: each run is a streamed completion.

A server that cannot be reached has no active model: its runs fail as broken, readers of outputs wake up, and a load brings it back once the
server is up. The same holds for a server that is up and serves nobody (`_serves`): its requests lose no attempt. Pausing stops the reading
of streams, which holds up a server that generates ahead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from qlm_agent.engines.openai.errors import ServerError, ServerRefused
from qlm_agent.engines.openai.load_watch import LIMITED, Load, LoadWatch
from qlm_agent.engines.openai.model_tiers import ServerTiers
from qlm_agent.engines.openai.pending_outputs import PendingOutputs
from qlm_agent.engines.openai.run import RemoteModel, Run
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import EngineFailure, EngineOutput, EngineRequest, EngineStats, FailureKind, ModelLoadFailed, Tier

TRIALS = 3
"""A server serves if it generates a token so often in a row. One that fails a share p of all requests passes for sound with (1 - p)^3."""


class OpenAiEngine:
    """See `qlm_agent.engines.port.Engine`. `kv_capacity_tokens`: by model, if neither the settings nor the server say it; `batch_max`: the
    agent's."""

    def __init__(
        self,
        models: Mapping[str, RemoteModel],
        settings: OpenAiSettings,
        *,
        kv_capacity_tokens: Mapping[str, int],
        batch_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._kv_capacity_tokens = kv_capacity_tokens
        self._kv_capacity_set = settings.kv_capacity_tokens
        self._batch_max = batch_max
        self._clock = clock
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._pending = PendingOutputs(settings.tell_every_s, clock)
        self._tiers = ServerTiers(models, sleeps=settings.sleep, swap_timeout_s=settings.swap_timeout_s, busy=lambda: bool(self._runs))
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._examining: dict[str, asyncio.Task[bool]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[None]] = set()  # of runs that ended
        self._changed = False  # a server, unread
        servers = {id(model.server): model.server for model in models.values()}
        self._watches = {key: self._watch_of(server, settings.poll_s) for key, server in servers.items()}
        self._servers = tuple(servers.values())

    @property
    def text_output(self) -> bool:
        return any(model.text_output for model in self._models.values())

    async def start(self) -> None:
        if self._tasks:
            return
        for server in self._servers:
            await server.open()
        self._tasks = [asyncio.create_task(watch.watch()) for watch in self._watches.values()]
        for task in self._tasks:
            task.add_done_callback(lambda _task: self._pending.wake())

    async def stop(self) -> None:
        tasks = [*self._tasks, *(task for _, task in self._runs.values()), *self._ending, *self._examining.values()]
        self._tasks = []
        self._pending.drop(self._runs)
        self._runs.clear()
        await _cancelled(tasks)
        for watch in self._watches.values():
            await watch.stop()
        for server in self._servers:
            await server.close()

    # Models -----------------------------------------------------------------------------------------------------------

    def tier(self, model: str) -> Tier:
        return self._tiers.tier(model)

    async def load_model(self, model: str, tier: Tier) -> float:
        began_s = self._clock()
        await self._tiers.load(model, tier)
        if tier is Tier.ACTIVE:
            watch = self._watch(model)
            await watch.poll()  # how much KV there is
            if not watch.up:
                self._tiers.lost()
                raise ModelLoadFailed(f"{self._models[model].server.base_url} became unreachable while {model} was loaded")
            if not self._capacity(model):
                self._tiers.lost()
                raise ModelLoadFailed(
                    f"{model}: neither {self._models[model].server.base_url}/metrics nor a profile says how much KV there is: "
                    "set agent.openai.kv_capacity_tokens"
                )
        return self._clock() - began_s

    # Runs -------------------------------------------------------------------------------------------------------------

    async def add(self, request: EngineRequest) -> None:
        model = self._models.get(request.model)
        if model is None or request.model != self._tiers.active:
            message = f"model {request.model} is not active, but {self._tiers.active or 'none'}"
            failure = EngineFailure(kind=FailureKind.AWAY, message=message)
            now_s = self._clock()
            self._pending.add(EngineOutput(request.run_id, b"", now_s, now_s, now_s, failure=failure), urgent=True)
            return
        run = Run(request, model, self._push, self._flowing, partial(self._serves, request.model), self._clock)
        task = asyncio.create_task(run.main())
        task.add_done_callback(lambda task: _log_bug(run, task))
        self._runs[request.run_id] = run, task

    async def abort(self, run_ids: Sequence[str]) -> None:
        self._pending.drop(run_ids)
        await _cancelled([self._runs.pop(run_id)[1] for run_id in run_ids if run_id in self._runs])

    async def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        """KV cannot be moved over HTTP."""
        return ()

    async def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        return ()

    async def outputs(self) -> Sequence[EngineOutput]:
        """Empty if a server became reachable or unreachable, or if the load of others changed."""
        outputs = await self._pending.take()
        self._changed = self._changed and bool(outputs)
        if self._changed:
            self._pending.wake()  # so that the next is empty
        for task in self._tasks:
            if task.done():
                task.result()  # raises the error that ended the watch, which must never end
        return outputs

    async def pause(self) -> None:
        self._flowing.clear()

    async def resume(self) -> None:
        self._flowing.set()

    def stats(self) -> EngineStats:
        active, own, others = self._tiers.active, self._own(None), Load()
        waiting = capacity = preemptions = 0
        if active:
            watch = self._watch(active)
            others, capacity = watch.others, self._capacity(active)
            if watch.last is not None:
                unheard = sum(not run.produced_any for run, _ in self._runs.values())
                waiting, preemptions = min(unheard, watch.last.waiting), watch.last.preemptions
        return EngineStats(
            active_model=active,
            warm_models=self._tiers.warm,
            running=own.runs - waiting + others.runs,
            waiting=waiting,
            batch_max=self._batch_max,
            kv_used_tokens=min(capacity, own.kv_tokens + others.kv_tokens),
            kv_capacity_tokens=capacity,
            preemptions=preemptions,
            others_runs=others.runs,
            others_kv_tokens=others.kv_tokens,
        )

    def _capacity(self, model: str) -> int:
        """Tokens of KV, 0 if unknown."""
        last = self._watch(model).last
        return self._kv_capacity_set or (last.kv_capacity_tokens if last else 0) or self._kv_capacity_tokens[model]

    def _push(self, output: EngineOutput, urgent: bool) -> None:
        found = self._runs.get(output.run_id)
        if found is None:
            return
        run, task = found
        if output.finish is not None or output.failure is not None:
            del self._runs[output.run_id]
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        else:
            self._watch(run.model.name).note_output()
        self._pending.add(output, urgent=urgent)

    # Servers ----------------------------------------------------------------------------------------------------------

    async def _serves(self, model: str) -> bool:
        """Whether the server of a failed run's model generates for others, so that the failure is the run's own. Concurrent failures share
        an examination. If it does not, the model is inactive until a load, which examines it too."""
        if model not in self._examining:
            task = asyncio.create_task(self._examine(model), name=f"examine-{model}")
            self._examining[model] = task
            task.add_done_callback(lambda _task: self._examining.pop(model))
        return await asyncio.shield(self._examining[model])

    async def _examine(self, model: str) -> bool:
        watch = self._watch(model)
        await watch.poll()
        if not watch.up or model != self._tiers.active:
            return False
        try:
            for _ in range(TRIALS):
                await self._tiers.try_out(model)
        except ServerRefused as error:
            if error.status == LIMITED:
                return True  # it serves, and limits calls
            self._lose(self._models[model].server, str(error), away=True)
            return False
        except (ServerError, ModelLoadFailed) as error:
            self._lose(self._models[model].server, str(error), away=True)
            return False
        return True

    def _lose(self, server: OpenAiServer, why: str, *, away: bool) -> None:
        """Fails the runs of an active server that does not serve. `away`: not by their fault."""
        structlog.get_logger().error("engine_server_lost", server=server.base_url, reason=why)
        self._tiers.lost()
        for run, task in list(self._runs.values()):
            run.broken(why, away=away)
            task.cancel()
        self._changed = True
        self._pending.wake()

    def _watch(self, model: str) -> LoadWatch:
        return self._watches[id(self._models[model].server)]

    def _watch_of(self, server: OpenAiServer, poll_s: float) -> LoadWatch:
        return LoadWatch(server, poll_s=poll_s, own=lambda: self._own(server), changed=lambda: self._server_changed(server))

    def _own(self, server: OpenAiServer | None) -> Load:
        """The load of this engine's runs, on a server or on all."""
        runs = [run for run, _ in self._runs.values() if server is None or run.model.server is server]
        return Load(runs=len(runs), kv_tokens=sum(run.prompt_tokens + run.made for run in runs))

    def _server_changed(self, server: OpenAiServer) -> None:
        active = self._tiers.active
        watch = self._watches[id(server)]
        if not watch.up and active and self._models[active].server is server:
            self._lose(server, f"{server.base_url} does not answer", away=False)
        self._changed = True
        self._pending.wake()


def _log_bug(run: Run, task: asyncio.Task[None]) -> None:
    """A run that ended in any other way than a run can is broken too: another instance continues its request."""
    if not task.cancelled() and (bug := task.exception()) is not None:
        structlog.get_logger().error("run_crashed", run_id=run.request.run_id, exc_info=bug)
        run.broken(f"the engine failed on it: {bug!r}")


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
