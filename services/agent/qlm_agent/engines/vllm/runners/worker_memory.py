"""What QLM asks vLLM's workers about memory, by `collective_rpc`: vLLM makes `WorkerMemory` a base of its worker class (EXTENSION)."""

from __future__ import annotations

import os

EXTENSION = "qlm_agent.engines.vllm.runners.worker_memory.WorkerMemory"


class WorkerMemory:
    """Its names must be ours alone. Answers are plain lists, since they may cross a socket."""

    def qlm_memory(self) -> list[int]:
        """Bytes that are free on this worker's device, and bytes that its engine keeps where a sleep can free them. On a CPU: those
        free on the host, and none."""
        import torch

        if not torch.cuda.is_available():
            return [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0]
        from vllm.device_allocator import get_mem_allocator_instance

        free, _ = torch.cuda.mem_get_info()
        return [int(free), int(get_mem_allocator_instance().get_current_usage())]

    def qlm_give_back(self) -> None:
        """Gives pinned host memory back that nobody uses. PyTorch keeps what a wake leaves otherwise."""
        import torch

        if torch.cuda.is_available():
            torch.accelerator.empty_host_cache()
