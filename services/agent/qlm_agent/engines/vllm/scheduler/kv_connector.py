"""KV swap in vLLM: a connector that keeps the KV of offloaded requests in host memory, each under its own id.

vLLM's OffloadingConnector is a cache: it keeps full blocks under the hash of their prefix, and drops the least recently used, so it cannot
promise that an offloaded request finds its KV again. This one keeps every stored block, the last, partly filled one included, until the
request is restored or ends; KV that does not fit is refused before anything is moved (ADR 23).

The scheduler decides (`scheduler.swap`) and queues copies here; the next step carries them to the workers, which make them before the model
runs: first those to the host, then those back. So blocks of the GPU are free for others from the moment of the decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request

from qlm_agent.engines.vllm.scheduler.kv_copying import BlockCopier, bytes_per_block

HOST_BYTES_KEY = "qlm_host_kv_bytes"
"""Key of the bytes of all workers together, in `kv_connector_extra_config`."""


class HostBlocks:
    """Owners of `capacity` blocks of host memory: an owner gets all that it needs or nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._owned: dict[str, list[int]] = {}

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def take(self, owner: str, count: int) -> bool:
        """Gives an owner without blocks its blocks; False if fewer are free."""
        assert owner not in self._owned, f"{owner} owns blocks already"
        if count > len(self._free):
            return False
        self._owned[owner] = [self._free.pop() for _ in range(count)]
        return True

    def of(self, owner: str) -> list[int]:
        """The blocks of an owner, in order."""
        return self._owned[owner]

    def give_back(self, owner: str) -> None:
        """Frees the blocks of an owner; one that has none is ignored."""
        self._free += reversed(self._owned.pop(owner, ()))


@dataclass(slots=True)
class KvMoves(KVConnectorMetadata):
    """The copies of one step: by request, (GPU block, host block) pairs."""

    engine_id: str
    stores: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    loads: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


class QlmKvConnector(KVConnectorBase_V1):
    """One for the scheduler and one in each worker, built by vLLM."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check(vllm_config, kv_cache_config)
        self.block_tokens = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self.host = HostBlocks(_host_blocks(vllm_config, kv_cache_config))
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._moves = KvMoves(self._engine_id)
        self._copier: BlockCopier | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # In the scheduler -------------------------------------------------------------------------------------------------

    def reserve(self, request_id: str, tokens: int) -> bool:
        """Takes host memory for the KV of so many tokens; False where it is full."""
        return self.host.take(request_id, -(-tokens // self.block_tokens))

    def store(self, request_id: str, gpu_blocks: list[int]) -> None:
        """The next step copies these blocks to the host memory that was reserved."""
        self._moves.stores[request_id] = list(zip(gpu_blocks, self.host.of(request_id), strict=True))

    def load(self, request_id: str, gpu_blocks: list[int], first: int) -> None:
        """The next step copies the stored KV, from block `first` on, to these blocks, the request's own; then its host memory is free."""
        self._moves.loads[request_id] = list(zip(gpu_blocks, self.host.of(request_id)[first:], strict=True))

    def release(self, request_id: str) -> None:
        """Frees host memory and forgets pending copies; safe for any request."""
        self._moves.stores.pop(request_id, None)
        self._moves.loads.pop(request_id, None)
        self.host.give_back(request_id)

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping while there are copies to make."""
        return bool(self._moves.stores or self._moves.loads)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        moves, self._moves = self._moves, KvMoves(self._engine_id)
        for request_id in moves.loads:  # a later step stores the KV that takes these blocks
            self.host.give_back(request_id)
        return moves

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        return None

    # In a worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._copier = BlockCopier(self._kv_cache_config, kv_caches, self.host.capacity)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls this in every step before anything else of it."""
        assert isinstance(kv_connector_metadata, KvMoves)
        assert self._copier is not None, "KV caches are not registered"
        # vLLM keeps one connector a process for the workers of all engines in it.
        assert kv_connector_metadata.engine_id == self._engine_id, "engines with KV swap need a process each"
        for copies in kv_connector_metadata.stores.values():
            self._copier.store(copies)
        for copies in kv_connector_metadata.loads.values():
            self._copier.load(copies)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None


def _host_blocks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    host_bytes = int(vllm_config.kv_transfer_config.kv_connector_extra_config[HOST_BYTES_KEY])
    return host_bytes // (bytes_per_block(kv_cache_config) * vllm_config.parallel_config.world_size)


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ValueError for a cache that it cannot keep."""
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    wrong = [
        name
        for name, is_so in {
            "models with several kinds of KV cache": len(groups) != 1,
            "models that drop KV (sliding windows, states)": not all(
                isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups
            ),
            "models whose KV cache is zeroed": kv_cache_config.needs_kv_cache_zeroing,
            "pipeline parallelism": parallel.pipeline_parallel_size != 1,
            "context parallelism": parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1,
            "speculative decoding": vllm_config.speculative_config is not None,
        }.items()
        if is_so
    ]
    if wrong:
        raise ValueError(f"KV swap does not support {', '.join(wrong)}: set agent.kv_swap to false")
