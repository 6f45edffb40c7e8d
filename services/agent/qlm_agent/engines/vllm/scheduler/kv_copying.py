"""Copies KV blocks between the GPU and a pool of host memory, inside a vLLM worker.

All copies of a step are on the model's stream, before it: the model may overwrite a block right after it is read. On CUDA the host memory
is pinned and vLLM's own batched copy does the work; elsewhere (CPU) PyTorch does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, group_kernel_blocks

Copies = Sequence[tuple[int, int]]
"""(GPU block, host block) pairs."""


class BlockCopier:
    """A pool of `host_blocks` blocks of host memory beside the KV caches of one worker. `kv_caches`: by layer, as vLLM registers them."""

    def __init__(self, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], host_blocks: int) -> None:
        self._native = current_platform.is_cuda_alike()
        self._gpu = _pages(kv_cache_config, kv_caches)
        self._host = [torch.empty((host_blocks, pages.shape[1]), dtype=torch.int8, pin_memory=self._native) for pages in self._gpu]
        self._under_way: list[tuple[torch.Tensor, ...]] = []  # descriptors of the last native copies

    def store(self, copies: Copies) -> None:
        """GPU to host."""
        if copies:
            gpu_ids, host_ids = _columns(copies)
            if self._native:
                self._copy(self._gpu, gpu_ids, self._host, host_ids)
            else:
                for gpu, host in zip(self._gpu, self._host, strict=True):
                    host.index_copy_(0, host_ids, gpu.index_select(0, gpu_ids))

    def load(self, copies: Copies) -> None:
        """Host to GPU."""
        if copies:
            gpu_ids, host_ids = _columns(copies)
            if self._native:
                self._copy(self._host, host_ids, self._gpu, gpu_ids)
            else:
                for gpu, host in zip(self._gpu, self._host, strict=True):
                    gpu.index_copy_(0, gpu_ids, host.index_select(0, host_ids))

    def _copy(self, sources: list[torch.Tensor], source_ids: torch.Tensor, targets: list[torch.Tensor], target_ids: torch.Tensor) -> None:
        """Submits to the current stream; source reads stay in its order (the model's last step may still be writing them)."""
        from vllm import _custom_ops

        addresses = [_addresses(tensors, ids) for tensors, ids in ((sources, source_ids), (targets, target_ids))]
        sizes = torch.from_numpy(np.concatenate([np.full(len(source_ids), pages.shape[1], dtype=np.int64) for pages in sources]))
        _custom_ops.swap_blocks_batch(addresses[0], addresses[1], sizes)
        self._under_way = [(*addresses, sizes)]


def bytes_per_block(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of a block over all layers of one worker."""
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)


def _pages(kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Each layer's cache as bytes: one row a block."""
    (group,) = kv_cache_config.kv_cache_groups
    page_bytes = int(group.kv_cache_spec.page_size_bytes)
    pages = []
    for layer in group.layer_names:
        blocks = group_kernel_blocks(kv_caches[layer], kv_cache_config.num_blocks)
        size = blocks.element_size()
        row_bytes = blocks.stride(0) * size
        assert row_bytes >= page_bytes, f"{layer}: a block of {page_bytes} bytes is not in one piece"
        view = torch.tensor([], dtype=torch.int8, device=blocks.device)
        view.set_(blocks.untyped_storage(), blocks.storage_offset() * size, (kv_cache_config.num_blocks, page_bytes), (row_bytes, 1))
        pages.append(view)
    return pages


def _columns(copies: Copies) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.tensor(copies, dtype=torch.int64)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def _addresses(tensors: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    rows = ids.numpy()
    return torch.from_numpy(np.concatenate([pages.data_ptr() + rows * pages.stride(0) for pages in tensors]))
