"""The engine processes, and the tier of each model.

On a CPU a warm model is an idle process, and warm models are bounded by a budget of host memory for their weights; the process of a model
that no longer fits loads the next model's weights in place if the two have one shape.

On CUDA a warm model is a sleeping process with its weights in host memory (level 1) or, if the GPU was another's all the time, one whose
files were read into host memory. A model that leaves the GPU and does not stay in host memory sleeps without weights (level 2). vLLM takes
a sleeping engine no deeper, so one that has to leave host memory later is ended (ADR 43).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import structlog

from qlm_agent.engines.port import EngineBusy, ModelLoadFailed, Tier
from qlm_agent.engines.simulated.host_memory import HostWeights
from qlm_agent.engines.vllm.engine_runs import EngineRuns
from qlm_agent.engines.vllm.folder import ModelFolder, read_ahead
from qlm_agent.engines.vllm.plans import VllmModel, load_plan
from qlm_agent.engines.vllm.process.child import CallFailed, Child, ChildEnded
from qlm_agent.engines.vllm.process.frames import Frame
from qlm_agent.engines.vllm.process.template import Template
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_core.vocabulary.errors import ConfigError, QlmError

WEIGHTS_LEVEL, NOTHING_LEVEL = 1, 2
"""Sleep levels of vLLM: weights move to host memory, or are dropped."""


class Placement:
    """`models` by name. `on_step` and `on_end`: see `Child`; the ended process is forgotten by then. Loads of different models run side by
    side; one model is made active at a time."""

    def __init__(
        self,
        models: Mapping[str, VllmModel],
        settings: VllmSettings,
        template: Template,
        runs: EngineRuns,
        *,
        batch_max: int,
        n_gpu: int,
        on_step: Callable[[Child, Frame], None],
        on_end: Callable[[Child, str], None],
    ) -> None:
        self.active = ""
        self.paused = False
        self._models = models
        self._settings = settings
        self._template = template
        self._runs = runs
        self._batch_max = batch_max
        self._n_gpu = n_gpu
        self._on_step = on_step
        self._on_end = on_end
        self._children: dict[str, Child] = {}
        self._asleep: dict[str, int] = {}
        self._weights_gb: dict[str, float] = {}
        self.host = HostWeights(budget_gb=settings.host_memory_gb, weights_gb=self._weights_gb)
        self._activating = asyncio.Lock()
        self._next_active = ""  # the model that becomes active now
        self._ending: list[Child] = []  # their processes may still exist
        self._loading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def child(self, model: str) -> Child | None:
        """Its process, None without one that lives."""
        return self._children.get(model)

    @property
    def children(self) -> Sequence[Child]:
        """All processes with a model."""
        return tuple(self._children.values())

    def tier(self, model: str) -> Tier:
        if model and model == self.active:
            return Tier.ACTIVE
        return Tier.WARM if self.host.holds(model) else Tier.COLD

    async def load(self, model: str, tier: Tier) -> float:
        """See `qlm_agent.engines.port.Engine.load_model`."""
        began_s = time.monotonic()
        if model not in self._models:
            raise ModelLoadFailed(f"model {model} is not one of {', '.join(self._models)}")
        match tier:
            case Tier.ACTIVE:
                async with self._activating:
                    self._next_active = model
                    try:
                        await self._activate(model)
                    finally:
                        self._next_active = ""
            case Tier.WARM:
                await self._warm(model)
            case Tier.COLD:
                await self._chill(model)
        return time.monotonic() - began_s

    async def stop(self) -> None:
        """Ends all processes."""
        children, self._children = list(self._children.values()), {}
        self.active = ""
        self.paused = False
        self._asleep.clear()
        for model in self.host.models:
            self.host.drop(model)
        for child in children:
            await child.stop()

    async def revive(self, model: str) -> None:
        """Restarts the active model's process, if it has none. Raises ModelLoadFailed."""
        async with self._activating:
            if self.active == model and model not in self._children:
                await self._become_active(model, await self._load(model))

    async def tidy(self) -> None:
        """Ends processes that hold excess host memory, unless they have offloaded runs."""
        for model in list(self._children):
            wanted = model in (self.active, self._next_active) or self.host.holds(model) or self._loading[model].locked()
            kept = self._settings.keep_cold and self._asleep.get(model) == NOTHING_LEVEL
            if not wanted and not kept:
                await self._end(model)

    # Tiers ------------------------------------------------------------------------------------------------------------

    async def _activate(self, model: str) -> None:
        previous = self.active
        if model == previous and model in self._children:
            return
        if model != previous:
            self._must_be_idle(previous)
        folder = self._folder(model)
        if self._sleeps and previous in self._children and previous != model:
            await self._leave(previous, beside=model)
        try:
            child = await self._woken(model) or await self._reloaded(model, folder, previous) or await self._load(model)
            await self._become_active(model, child)
        except BaseException:
            if self._sleeps and previous in self._asleep and (back := await self._woken(previous)) is not None:
                await self._become_active(previous, back)
            raise
        if previous not in self._children:
            self.host.drop(previous)  # it ended while it was active, with its weights
        if self.host.fits(model):
            self.host.hold(model)
        await self.tidy()

    async def _become_active(self, model: str, child: Child) -> None:
        await self._request(child, "pause" if self.paused else "resume")
        self.active = model

    async def _warm(self, model: str) -> None:
        folder = self._folder(model)
        if model == self.active:
            self._must_be_idle(model)
        elif self.host.holds(model):
            return
        if not self.host.fits(model):
            raise ModelLoadFailed(
                f"model {model}: its weights of {folder.weights_bytes / 1e9:.3g} GB do not fit in the {self.host.budget_gb:g} GB of "
                "agent.vllm.host_memory_gb"
            )
        if model == self.active:
            async with self._activating:
                self._must_be_idle(model)
                self.active = ""
                if self._sleeps and not await self._to_sleep(model, WEIGHTS_LEVEL):
                    raise ModelLoadFailed(f"model {model} did not fall asleep; its process was ended")
        elif self._sleeps:
            await self._warm_for_gpu(model, folder)
        elif model not in self._children:
            await self._load(model)
        self.host.hold(model)
        await self.tidy()
        if self._sleeps and self.active in self._children and not self.host.holds(self.active):
            await self._trim(self._children[self.active])

    async def _trim(self, child: Child) -> None:
        """Frees host memory that a process keeps since its last sleep: another model needs it."""
        try:
            await child.call("trim")
        except (CallFailed, ChildEnded) as error:
            structlog.get_logger().warning("vllm_keeps_host_memory", model=child.model, error=error.message)

    async def _warm_for_gpu(self, model: str, folder: ModelFolder) -> None:
        """Loads by way of a free GPU; else reads its files into host memory."""
        if not self.active:
            async with self._activating:
                if not self.active:
                    await self._woken(model) or await self._load(model)
                    if not await self._to_sleep(model, WEIGHTS_LEVEL):
                        raise ModelLoadFailed(f"model {model} did not fall asleep; its process was ended")
                    return
        try:
            await read_ahead(folder.files)
        except OSError as error:
            raise ModelLoadFailed(f"model {model}: {error}") from error

    async def _chill(self, model: str) -> None:
        left = model == self.active
        if left:
            async with self._activating:
                self._must_be_idle(model)
                self.active = ""
        self.host.drop(model)
        if left and self._sleeps:
            await self._drop_weights(model)
        elif self._asleep.get(model) != NOTHING_LEVEL:
            await self._end(model)

    async def _leave(self, model: str, *, beside: str) -> None:
        """Takes the active model off the GPU, to host memory if that has room for both."""
        if self._stays(model, beside=beside):
            await self._to_sleep(model, WEIGHTS_LEVEL)
        else:
            gb = round(self._weights_gb[model], 3)
            structlog.get_logger().info(
                "vllm_weights_dropped", model=model, weights_gb=gb, beside=beside, host_memory_gb=self.host.budget_gb
            )
            self.host.drop(model)
            await self._drop_weights(model)

    async def _drop_weights(self, model: str) -> None:
        """Drops weights from the GPU and from host memory."""
        if model not in self._children:
            return
        if self._settings.keep_cold or self._runs.of(model):  # offloaded ones need their process
            await self._to_sleep(model, NOTHING_LEVEL)
        else:
            await self._end(model)

    def _must_be_idle(self, model: str) -> None:
        runs = self._runs.of(model, offloaded=False)
        if runs:
            raise EngineBusy(f"model {model} has {len(runs)} runs")

    # Processes --------------------------------------------------------------------------------------------------------

    @property
    def _sleeps(self) -> bool:
        return self._settings.device == "cuda"

    def _folder(self, model: str) -> ModelFolder:
        folder = ModelFolder.read(model, self._models[model].weights)
        self._weights_gb[model] = folder.weights_bytes / 1e9
        return folder

    async def _load(self, model: str) -> Child:
        """A fresh process with the model. Raises ModelLoadFailed."""
        async with self._loading[model]:
            if model in self._children:
                return self._children[model]
            await self._wait_for_exits()
            plan = load_plan(self._models[model], self._folder(model), self._settings, batch_max=self._batch_max, n_gpu=self._n_gpu)
            child: Child | None = None
            errors_logged = self._template.errors_logged
            try:
                child = await self._template.fork(self._new_child)
                child.model = model
                answer = await child.call("load", timeout_s=self._settings.load_timeout_s, plan=asdict(plan))
            except (ChildEnded, CallFailed, ConfigError, OSError) as error:  # the last two: no process can be started
                if child is not None:
                    self._ending.append(child)
                    await child.stop()
                first, why = await self._template.first_error(errors_logged), error.message if isinstance(error, QlmError) else str(error)
                why = why if first in why else f"{why} First of all: {first}"
                raise ModelLoadFailed(f"model {model} could not be loaded: {why}") from error
            except BaseException:
                if child is not None:
                    self._ending.append(child)
                    child.kill("not needed any more")
                raise
            self._children[model] = child
            structlog.get_logger().info("vllm_loaded", model=model, pid=child.pid, kv_limit_tokens=answer["kv_limit_tokens"])
            return child

    def _new_child(self, exit_code: Callable[[int], asyncio.Future[int]]) -> Child:
        return Child(step_timeout_s=self._settings.step_timeout_s, on_step=self._on_step, on_end=self._ended, exit_code=exit_code)

    async def _wait_for_exits(self) -> None:
        """Waits for ended processes, which hold GPU memory until they exit."""
        while self._ending:
            child = self._ending.pop()
            if self._sleeps:
                await self._template.wait_for_exit(child.pid)

    async def _woken(self, model: str) -> Child | None:
        """The model's process, ready to serve; None if there is none, or it could not be made ready and was ended."""
        child = self._children.get(model)
        if child is None:
            return None
        try:
            level = self._asleep.get(model)
            if level is not None:
                await self._wait_for_exits()
                await child.call("wake", timeout_s=self._settings.load_timeout_s, level=level)
                del self._asleep[model]
            await child.call("ping")
        except (CallFailed, ChildEnded) as error:
            structlog.get_logger().error("vllm_not_woken", model=model, error=error.message, then="cold start")
            await self._end(model, even_offloaded=True)
            return None
        return child

    async def _to_sleep(self, model: str, level: int) -> bool:
        """Puts an awake model to sleep; returns whether it sleeps. A process that does not free its memory is ended."""
        child = self._children[model]
        async with self._loading[model]:  # `tidy` must not end it meanwhile
            try:
                await child.call("sleep", timeout_s=self._settings.load_timeout_s, level=level)
                self._asleep[model] = level
                return True
            except (CallFailed, ChildEnded) as error:
                structlog.get_logger().error("vllm_not_asleep", model=model, error=error.message, then="its process is ended")
        self.host.drop(model)
        await self._end(model, even_offloaded=True)
        return False

    async def _reloaded(self, model: str, folder: ModelFolder, previous: str) -> Child | None:
        """The previous model's process with the model's weights, if both have one shape and only one of them may stay."""
        child = self._children.get(previous)
        if child is None or self._sleeps or self._runs.of(previous) or self._stays(previous, beside=model):
            return None
        if folder.shape != self._folder(previous).shape:
            return None
        ours, others = self._models[model], self._models[previous]
        if (ours.context_tokens_max, ours.chat_template) != (others.context_tokens_max, others.chat_template):
            return None
        del self._children[previous]
        self.host.drop(previous)
        self.active = ""
        try:
            await child.call("reload", timeout_s=self._settings.load_timeout_s, weights=str(folder.path))
        except (CallFailed, ChildEnded) as error:
            structlog.get_logger().error("weights_not_reloaded", model=model, error=error.message, then="cold start")
            await child.stop()
            return None
        child.model = model
        self._children[model] = child
        return child

    def _stays(self, model: str, *, beside: str) -> bool:
        """Whether a held model is still held beside another one."""
        trial = HostWeights(budget_gb=self.host.budget_gb, weights_gb=self._weights_gb)
        for each in self.host.models:
            trial.hold(each)
        if trial.fits(beside):
            trial.hold(beside)
        return trial.holds(model)

    async def _end(self, model: str, *, even_offloaded: bool = False) -> None:
        if self._runs.of(model) and not even_offloaded:
            return
        child = self._children.pop(model, None)
        self._asleep.pop(model, None)
        if child is not None:
            self._ending.append(child)
            await child.stop()
            if even_offloaded:
                self._on_end(child, "was ended")

    async def _request(self, child: Child, op: str) -> dict[str, Any]:
        try:
            return await child.call(op)
        except (CallFailed, ChildEnded) as error:
            raise ModelLoadFailed(f"model {child.model}: {error.message}") from error

    def _ended(self, child: Child, why: str) -> None:
        if self._children.get(child.model) is child:
            self._ending.append(child)
            del self._children[child.model]
            self._asleep.pop(child.model, None)
            if child.model != self.active:
                self.host.drop(child.model)
        self._on_end(child, why)
