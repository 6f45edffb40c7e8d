"""QLM's calls to vLLM's workers about memory, by `collective_rpc`: vLLM makes `WorkerMemory` a base of its worker class (EXTENSION)."""

from __future__ import annotations

import os

EXTENSION = "qlm_agent.engines.vllm.runners.worker_memory.WorkerMemory"


class WorkerMemory:
    """Its names must be ours alone. Answers are plain lists, since they may cross a socket."""

    def qlm_memory(self) -> list[int]:
        """Free bytes on this worker's device, and its engine's bytes that a sleep can free. On a CPU: free bytes of the host, and 0."""
        import torch

        if not torch.cuda.is_available():
            return [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0]
        from vllm.device_allocator import get_mem_allocator_instance

        free, _ = torch.cuda.mem_get_info()
        return [int(free), int(get_mem_allocator_instance().get_current_usage())]

    def qlm_give_back(self) -> None:
        """Frees unused pinned host memory. PyTorch otherwise keeps it after a wake."""
        import torch

        if torch.cuda.is_available():
            torch.accelerator.empty_host_cache()
