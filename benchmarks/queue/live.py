"""A cluster of real processes for one part of the bench, traced, and the CPU time of its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.queue.collector import Collector
from benchmarks.queue.figures import LEASE_TTL_S
from benchmarks.queue.prompts import CONTEXT_TOKENS_MAX, MODEL, PROFILE
from qlm_core.vocabulary.errors import Unavailable
from qlm_load.demo.cluster import Cluster
from qlm_process.cluster.state import ClusterState

START_TIMEOUT_S = 180.0
GPU = "H100-80GB"


CpuUse = dict[str, dict[str, float]]
"""`cores` and `cpu_us_each`, by process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parts of a cluster, besides one estimator. `time_scale`: of its simulated engines, which have no hidden bias; `agent`,
    `simulated`: more settings of them; `queue`: of the queue; `up`: of the supervision. `http`: gateways serve HTTP, too."""

    gateways: int = 1
    agents: int = 1
    planners: int = 1
    durability: str = "process"
    http: bool = False
    time_scale: float = 1.0
    agent: Mapping[str, object] = field(default_factory=dict)
    simulated: Mapping[str, object] = field(default_factory=dict)
    queue: Mapping[str, object] = field(default_factory=dict)
    up: Mapping[str, object] = field(default_factory=dict)

    def config(self, seed: int) -> dict[str, object]:
        """The configuration file's content."""
        simulated = {"time_scale": self.time_scale, "seed": seed, "bias_max": 0.0, **self.simulated}
        return {
            "queue": {"name": "bench", "durability": self.durability, "lease_ttl_s": LEASE_TTL_S, **self.queue},
            "models": [{"name": MODEL, "profile": PROFILE, "context_tokens_max": CONTEXT_TOKENS_MAX}],
            "gateways": [
                {"name": f"gateway-{number}", "listen": "127.0.0.1:0", "http": {"listen": "127.0.0.1:0" if self.http else ""}}
                for number in range(self.gateways)
            ],
            # Work left at the end of a part is dropped.
            "gateway": {"drain_grace_s": 0.1},
            "planners": [{"name": f"planner-{number}"} for number in range(self.planners)],
            "agents": [{"name": f"h100-{number}", "gpu": GPU, "n_gpu": 1, "models": [MODEL]} for number in range(self.agents)],
            "agent": {"drain_finish_s": 0.0, **self.agent, "simulated": simulated},
            "up": dict(self.up),
        }


class LiveCluster:
    """A running cluster; an asynchronous context manager, which stops it in order. `state`: its state once all processes served."""

    def __init__(self, folder: Path, shape: Shape, seed: int, collector: Collector) -> None:
        """`folder` takes its configuration, state and logs."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(shape.config(seed), sort_keys=False), encoding="utf-8")
        self._cluster = Cluster(folder, str(path), {}, collector.environment)
        self.state: ClusterState

    async def __aenter__(self) -> LiveCluster:
        try:
            self.state = await self._cluster.start(START_TIMEOUT_S)
        except BaseException:
            await self._cluster.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cluster.stop()

    @property
    def gateway(self) -> str:
        """Address of the gateway."""
        return self.state.of("gateway")[0].address

    @property
    def http(self) -> str:
        """Host and port of its HTTP."""
        return self.http_addresses[0]

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """Host and port of each gateway's HTTP."""
        return tuple(gateway.http.removeprefix("http://") for gateway in self.state.of("gateway"))

    def now(self) -> ClusterState:
        """Its present processes. Raises Unavailable if `qlm up` has ended."""
        state = self._cluster.state()
        if state is None:
            raise Unavailable(f"`qlm up` ended; see {self._cluster.log_path}")
        return state


class CpuMeter:
    """CPU time of processes between a worker's "begin" and "end" events."""

    def __init__(self, live: LiveCluster) -> None:
        self._pids = {process.name: process.pid for process in live.state.processes}
        self._begin: tuple[float, dict[str, float]] = (0.0, {})
        self._end: tuple[float, dict[str, float]] = (0.0, {})

    def on_event(self, event: str) -> None:
        """Reads the clocks of all processes at "begin" and at "end"."""
        reading = (time.monotonic(), {name: cpu_s(pid) for name, pid in self._pids.items()})
        if event == "begin":
            self._begin = reading
        elif event == "end":
            self._end = reading

    def summary(self, count: int) -> CpuUse:
        """Cores that each process kept busy (those below 0.01 left out), and microseconds of CPU time for each of `count` operations: the
        latter hardly depends on the machine's other load."""
        seconds = max(self._end[0] - self._begin[0], 1e-9)
        used_s = {name: self._end[1].get(name, 0.0) - self._begin[1].get(name, 0.0) for name in self._pids}
        cores = {name: round(each_s / seconds, 2) for name, each_s in used_s.items()}
        return {
            "cores": {name: share for name, share in cores.items() if share >= 0.01},
            "cpu_us_each": {name: round(used_s[name] * 1e6 / max(1, count), 1) for name, share in cores.items() if share >= 0.01},
        }


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, 0 for an ended one."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
