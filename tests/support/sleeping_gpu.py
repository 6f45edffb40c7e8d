"""A GPU and the memory of its host, with engine processes on them that sleep and wake as vLLM 0.32 does: threads that run the agent's own
loop of an engine process (`ChildLoop`) and its checks of memory (`SleepingModel`), with a made-up vLLM below."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from qlm_agent.engines.port import TextPrompt
from qlm_agent.engines.vllm.process.child import Child
from qlm_agent.engines.vllm.process.frames import Frame
from qlm_agent.engines.vllm.process.loop import ChildLoop
from qlm_agent.engines.vllm.runner.port import LoadPlan, RunnerStats, RunOutput, RunPlan
from qlm_agent.engines.vllm.runner.sleeping import SleepingModel
from qlm_core.vocabulary.chat import ChatPrompt

START_TIMEOUT_S = 10.0

WEIGHTS_BYTES = 1_000_000
KV_BYTES = 4 * 32 * 2 * 4 * 4 * 2 * 32
"""For the models of `model_folder`; KV of four blocks."""

CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}


def model_folder(path: Path) -> str:
    """Makes a model's folder, as far as the agent reads it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(WEIGHTS_BYTES))
    return str(path)


class Gpu:
    """`kv_bytes`, `weights_bytes`: of any model. `processes`: how many were started. Faults are for the next process that does it."""

    def __init__(self, *, models: float, weights_bytes: int, kv_bytes: int) -> None:
        self.weights_bytes = weights_bytes
        self.kv_bytes = kv_bytes
        self.total_bytes = int(models * (weights_bytes + kv_bytes))
        self.engines: list[MadeUpVllm] = []
        self.processes = 0
        self.load_fails = 0
        self.wake_fails = 0
        self.sleep_keeps = 0
        self.reads: list[str] = []

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - sum(each.on_gpu for each in self.engines)

    @property
    def pinned_bytes(self) -> int:
        """Host memory that engines have taken, in use or not."""
        return sum(each.backup + each.cached for each in self.engines)


class MadeUpVllm:
    """vLLM's engine as `SleepingModel` uses it, after the source of `Executor.sleep`, `CuMemAllocator` and PyTorch's pinned memory."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.asleep = False
        self.on_gpu = self.backup = self.cached = 0
        self._take()
        gpu.engines.append(self)

    def _take(self) -> None:
        if self.gpu.load_fails and not self.asleep:
            self.gpu.load_fails -= 1
            raise RuntimeError("CUDA out of memory")
        wanted = self.gpu.weights_bytes + self.gpu.kv_bytes
        if wanted > self.gpu.free_bytes:
            raise RuntimeError("CUDA out of memory")
        self.on_gpu = wanted

    def sleep(self, *, level: int, mode: str) -> None:
        assert mode == "keep", "vLLM aborts all requests otherwise"
        if self.asleep:
            return  # "Executor is already sleeping."
        self.asleep = True
        if self.gpu.sleep_keeps:
            self.gpu.sleep_keeps -= 1
            return
        self.on_gpu = 0
        if level == 1:
            self.backup, self.cached = self.gpu.weights_bytes, 0

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        if not self.asleep or tuple(tags) == ("weights",):  # the device gives all at once, with the last of them
            return
        if self.gpu.wake_fails:
            self.gpu.wake_fails -= 1
            raise RuntimeError("CUDA out of memory")
        self._take()
        self.backup, self.cached = 0, max(self.backup, self.cached)
        self.asleep = False

    def is_sleeping(self) -> bool:
        return self.asleep

    def collective_rpc(self, method: str, kwargs: Mapping[str, Any] | None = None) -> Any:
        match method:
            case "qlm_memory":
                return [[self.gpu.free_bytes, self.gpu.weights_bytes + self.gpu.kv_bytes]]
            case "qlm_give_back":
                self.cached = 0
            case "reload_weights":
                assert kwargs is not None
                self.gpu.reads.append(kwargs["weights_path"])
        return [None]


class SleepingRunner:
    """A runner without runs: see `qlm_agent.engines.vllm.runner.port.Runner`."""

    kv_limit_tokens = 1024
    eos_ids: frozenset[int] = frozenset()
    busy = False

    def __init__(self, gpu: Gpu, plan: LoadPlan) -> None:
        self.engine = MadeUpVllm(gpu)
        self._weights = plan.weights
        self._now_s = 0.0
        self._sleeping = SleepingModel(self.engine, expected_bytes=plan.device_bytes, clock=lambda: self._now_s, wait=self._wait)

    def _wait(self, seconds: float) -> None:
        self._now_s += seconds

    def check(self) -> None: ...

    def text_prompt(self, prompt: TextPrompt) -> list[int]:
        raise NotImplementedError

    def chat_prompt(self, prompt: ChatPrompt) -> list[int]:
        raise NotImplementedError

    def text_of(self, before: Sequence[int]) -> Callable[[int], str | None]:
        raise NotImplementedError

    def add(self, plan: RunPlan, output_tokens: int) -> None:
        raise NotImplementedError

    def abort(self, run_ids: Sequence[str]) -> None: ...

    def step(self) -> list[RunOutput]:
        return []

    def pause(self, paused: bool) -> None: ...

    def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        return []

    def offloaded(self) -> Collection[str]:
        return []

    def leaving(self) -> Collection[str]:
        return []

    def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        return []

    def reload(self, weights: str) -> None:
        self.engine.collective_rpc("reload_weights", {"weights_path": weights})
        self._weights = weights

    def sleep(self, level: int) -> None:
        self._sleeping.sleep(level)

    def wake(self, level: int) -> None:
        self._sleeping.wake(level, self._weights)

    def trim(self) -> None:
        self._sleeping.give_back()

    def stats(self) -> RunnerStats:
        return RunnerStats(running=0, waiting=0, kv_used_tokens=0, kv_capacity_tokens=1024, preemptions=0)

    def close(self) -> None: ...


class ThreadTemplate:
    """In the place of `qlm_agent.engines.vllm.process.template.Template`: its engine processes are threads."""

    last_lines: tuple[str, ...] = ()
    errors_logged = 0

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._engines: list[tuple[Child, threading.Thread]] = []

    async def fork(self, make: Callable[[Callable[[int], asyncio.Future[int]]], Child]) -> Child:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        thread.start()
        self._gpu.processes += 1
        loop = asyncio.get_running_loop()
        child = make(lambda pid: loop.create_future())
        self._engines.append((child, thread))
        await loop.create_connection(lambda: child, sock=ours)
        await child.ready(START_TIMEOUT_S)
        return child

    async def first_error(self, after: int) -> str:
        return ""

    async def wait_for_exit(self, pid: int) -> None:
        """All that were ended: threads have no process ids of their own."""
        for child, thread in self._engines:
            if child.ended:
                await asyncio.to_thread(thread.join)
        self._engines = [(child, thread) for child, thread in self._engines if thread.is_alive()]

    def _serve(self, channel: socket.socket) -> None:
        made: list[SleepingRunner] = []

        def runner(plan: LoadPlan) -> SleepingRunner:
            made.append(SleepingRunner(self._gpu, plan))
            return made[-1]

        try:
            with channel:
                channel.sendall(Frame({"t": "hello", "pid": 0}).encoded())
                ChildLoop(channel, runner).run()
        except OSError:
            pass  # the agent has closed its end
        finally:
            for each in made:  # the end of a process gives all back
                self._gpu.engines.remove(each.engine)
