"""A first profile of the servers of `qlm serve`, measured while they serve: until then predictions begin from data sheets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import structlog

from qlm.api.v1 import estimator_pb2
from qlm_agent.config import AgentConfig
from qlm_agent.profiling.design import FIRST
from qlm_agent.profiling.rows import ProfiledModel
from qlm_agent.profiling.session import profile_engine
from qlm_cli.profiles.estimator_calls import call_estimator
from qlm_cli.up.cluster import Cluster
from qlm_cli.up.config import UpConfig
from qlm_core.profiles.hardware_profile import ORIGIN_MEASURED, HardwareKey
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import QlmError
from qlm_process.config import load_config
from qlm_process.wire import profile as profile_wire

POLL_S = 5.0
LIMIT_S = 60.0
"""Server time for one model; runs that have not begun by then are left out."""
TRIES_MAX = 3
"""Measurements of one pair of GPUs and model that may fail."""


async def measure_first(cluster: Cluster, path: Path, given: Mapping[str, object]) -> None:
    """Runs until cancelled: measures each pair of GPUs and model of the configuration file at `path` once, one after the other, unless the
    queue has a measured row of it, and gives the rows to the estimator. A failure is logged, and the prior stays."""
    tries: Counter[HardwareKey] = Counter()
    while True:
        await asyncio.sleep(POLL_S)
        if not cluster.state.ready:
            continue
        try:
            addresses = tuple(process.address for process in cluster.state.of("gateway"))
            config, pair = await asyncio.to_thread(_unmeasured, path, given, addresses, tries)
        except QlmError as error:
            structlog.get_logger().warning("first_profile_waits", reason=error.message)
            continue
        if config is None:
            continue
        tries[pair] += 1
        log = structlog.get_logger().bind(server=config.agent.openai.base_url, model=pair[2])
        try:
            log.info("first_profile_begins", seconds_max=LIMIT_S)
            profiles = shipped_snapshot()
            names = [next(model.name for model in config.models if model.profile == pair[2])]
            (found,) = await profile_engine(
                config, profiles, names, limit_s=LIMIT_S, say=lambda _: None, clock=time.monotonic, extent=FIRST
            )
            await asyncio.to_thread(_import, found, addresses)
            tries[pair] = TRIES_MAX
            log.info("first_profile_measured", evidence=found.evidence)
        except QlmError as error:
            log.warning("first_profile_failed", reason=error.message, tries_left=TRIES_MAX - tries[pair])


def _unmeasured(
    path: Path, given: Mapping[str, object], addresses: tuple[str, ...], tries: Mapping[HardwareKey, int]
) -> tuple[AgentConfig | None, HardwareKey]:
    """An agent's configuration and a pair of it to measure. Raises QlmError."""
    known: set[HardwareKey] | None = None
    for entry in load_config(UpConfig, str(path), overrides=given).agents:
        config = load_config(AgentConfig, str(path), "agents", entry.name, given)
        agent, profiles = config.agent, {model.name: model.profile for model in config.models}
        for name in agent.models:
            pair = (agent.gpu, agent.n_gpu, profiles[name])
            if tries.get(pair, 0) >= TRIES_MAX:
                continue
            known = _measured(addresses) if known is None else known
            if pair not in known:
                return config, pair
    return None, ("", 0, "")


def _measured(addresses: tuple[str, ...]) -> set[HardwareKey]:
    """Pairs whose rows the estimator has from a measurement."""
    answer = call_estimator(None, addresses, lambda stub: stub.GetProfiles, estimator_pb2.GetProfilesRequest())
    return {row.key for row in profile_wire.from_proto(answer).hardware if not row.instance and row.origin == ORIGIN_MEASURED}


def _import(found: ProfiledModel, addresses: tuple[str, ...]) -> None:
    """As `qlm profiles import`."""
    profiles = profile_wire.to_proto(ProfileSnapshot(version=0, made_s=0.0, hardware=(found.row,), workload=()))
    call_estimator(None, addresses, lambda stub: stub.ImportProfiles, estimator_pb2.ImportProfilesRequest(profiles=profiles))
