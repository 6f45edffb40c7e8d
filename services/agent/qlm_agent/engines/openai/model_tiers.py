"""The active model, and the sleeping and waking of its server.

Without sleep (`sleeps` false) all models are served all the time: tiers only select whose runs this engine takes. With it every model has a
server of its own on the same GPUs, and one is awake. HTTP shows no memory, so the engine verifies: a server must have sleep mode, must
report that it sleeps, and must generate a token after it woke. A server found asleep is warm, but its sleep level is unknown, so its
weights are read from disk again when it wakes. A server that refuses connections has died or is starting and could free nothing, so others
wake beside it; if it is back by then and holds the memory, their wake fails and is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from qlm_agent.engines.openai.errors import ServerAbsent, ServerError
from qlm_agent.engines.openai.run import RemoteModel
from qlm_agent.engines.port import EngineBusy, ModelLoadFailed, Tier

POLL_S = 0.1
UNKNOWN, IN_HOST_MEMORY, DROPPED = 0, 1, 2
"""Levels of vLLM's sleep: what happens to weights. HTTP reports no level: for a server put to sleep by others, or by an earlier agent, it
is unknown."""


class ServerTiers:
    """`busy`: whether there are runs. One load at a time; others wait for it."""

    def __init__(self, models: Mapping[str, RemoteModel], *, sleeps: bool, swap_timeout_s: float, busy: Callable[[], bool]) -> None:
        self._models = models
        self._sleeps = sleeps
        self._swap_timeout_s = swap_timeout_s
        self._busy = busy
        self._lock = asyncio.Lock()
        self._levels: dict[str, int] = {}
        self._warm: list[str] = []
        self._skipped: set[str] = set()  # models whose servers were absent when others woke: they may be back, and awake
        self._tried: set[str] = set()  # models that returned token ids, since their servers were last lost
        self.active = ""

    @property
    def warm(self) -> tuple[str, ...]:
        if self._sleeps:
            return tuple(model for model, level in self._levels.items() if level != DROPPED)
        return tuple(self._warm)

    def tier(self, model: str) -> Tier:
        if model == self.active:
            return Tier.ACTIVE if model else Tier.COLD
        return Tier.WARM if model in self.warm else Tier.COLD

    async def load(self, model: str, tier: Tier) -> None:
        """Raises EngineBusy, ModelLoadFailed."""
        if model not in self._models:
            raise ModelLoadFailed(f"model {model} is not served here")
        async with self._lock:
            if self.tier(model) is tier and tier is not Tier.ACTIVE:
                return
            if model != self.active if tier is Tier.ACTIVE else model == self.active:
                self._check_idle()
            try:
                await self._load(model, tier)
            except ServerError as error:
                raise ModelLoadFailed(f"{model} cannot be {tier.value}: {error}") from error

    def lost(self) -> None:
        """Marks the active model's server as lost: no model is active until the next load."""
        self._tried.discard(self.active)
        self.active = ""

    def _check_idle(self) -> None:
        if self.active and self._busy():
            raise EngineBusy(f"model {self.active} has runs")

    async def _load(self, model: str, tier: Tier) -> None:
        await self._present(model)
        if tier is Tier.ACTIVE:
            await self._activate(model)
            return
        if self._sleeps:
            await self._fall_asleep(model, IN_HOST_MEMORY if tier is Tier.WARM else DROPPED)
        if model == self.active:
            self.active = ""
        self._warm = [each for each in self._warm if each != model] + ([model] if tier is Tier.WARM else [])

    async def _present(self, model: str) -> None:
        remote = self._models[model]
        found = await remote.server.models()
        if remote.remote not in found:
            raise ModelLoadFailed(f"{remote.server.base_url} has no model {remote.remote}, but {', '.join(found) or 'none'}")

    async def _activate(self, model: str) -> None:
        old = self.active
        if model == old:
            return
        if self._sleeps:
            try:
                for other in self._models:
                    if other != model and (not old or other == old or other in self._skipped):
                        await self._free_gpu(other)
                await self._wake(model)
            except (ServerError, ModelLoadFailed):
                await self._reactivate(old)
                raise
        elif model not in self._tried:
            await self.try_out(model)
        self._check_idle()
        self.active = model
        self._skipped.discard(model)
        self._warm = [each for each in self._warm if each != model] + ([old] if old else [])

    async def _free_gpu(self, model: str) -> None:
        try:
            await self._fall_asleep(model)
        except ServerAbsent as error:
            structlog.get_logger().warning("engine_server_skipped", model=model, error=str(error))
            self._levels.pop(model, None)
            self._skipped.add(model)
        else:
            self._skipped.discard(model)

    async def _reactivate(self, old: str) -> None:
        if not old:
            return
        try:
            await self._wake(old)
        except (ServerError, ModelLoadFailed) as error:
            structlog.get_logger().error("model_not_woken", model=old, error=str(error))
            self.active = ""

    async def _fall_asleep(self, model: str, level: int | None = None) -> None:
        """A sleeping server keeps its level: it could change that only awake, on GPUs in use. Without a level any will do."""
        server = self._models[model].server
        if not await server.can_sleep():
            raise ModelLoadFailed(f"{server.base_url} frees no memory when it sleeps: it was started without --enable-sleep-mode")
        if await server.is_sleeping():
            known = self._levels.setdefault(model, UNKNOWN)
            if level is not None and (level == DROPPED) is not (known == DROPPED):
                raise ModelLoadFailed(f"{server.base_url} sleeps already, at {f'level {known}' if known else 'an unknown level'}")
            return
        level = IN_HOST_MEMORY if level is None else level
        await server.post(f"/sleep?level={level}")
        self._levels[model] = level
        await self._until_sleeping(model, True)

    async def _wake(self, model: str) -> None:
        try:
            await self._wake_up(model)
        except (ServerError, ModelLoadFailed):
            await self._lie_down(model)
            raise

    async def _lie_down(self, model: str) -> None:
        """After a failed wake: the server may be awake all the same, and hold the memory. Its weights are unknown too, and read again at
        its wake."""
        self._skipped.add(model)
        try:
            await self._free_gpu(model)
        except (ServerError, ModelLoadFailed) as error:
            structlog.get_logger().error("model_not_asleep", model=model, error=str(error))
        if model in self._levels:
            self._levels[model] = UNKNOWN

    async def _wake_up(self, model: str) -> None:
        remote = self._models[model]
        level = self._levels.pop(model, UNKNOWN)
        if await remote.server.is_sleeping():
            if level == IN_HOST_MEMORY:
                await remote.server.post("/wake_up")
            else:
                await remote.server.post("/wake_up?tags=weights")
                await remote.server.post("/collective_rpc", {"method": "reload_weights"})
                await remote.server.post("/wake_up?tags=kv_cache")
                await remote.server.post("/reset_prefix_cache")
            await self._until_sleeping(model, False)
        await self.try_out(model)

    async def try_out(self, model: str) -> None:
        """Has it generate a token. Raises ModelLoadFailed if it returns no ids and should: no request could succeed."""
        remote = self._models[model]
        body: dict[str, object] = {"model": remote.remote, "prompt": "a", "max_tokens": 1, "temperature": 0}
        if not remote.text_output:
            body |= {"prompt": [1], "return_token_ids": True}
        choice = await remote.server.generate(body)
        if not remote.text_output and not isinstance(choice.get("token_ids"), list):
            raise ModelLoadFailed(f"{remote.server.base_url} returns no token ids: it needs vLLM >= 0.10.2, or agent.openai.output=text")
        self._tried.add(model)

    async def _until_sleeping(self, model: str, sleeping: bool) -> None:
        server = self._models[model].server
        try:
            async with asyncio.timeout(self._swap_timeout_s):
                while await server.is_sleeping() is not sleeping:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise ModelLoadFailed(f"{server.base_url} was called to {'sleep' if sleeping else 'wake up'} and does not") from error
