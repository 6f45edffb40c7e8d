"""The engine arguments that give a vLLM engine KV swap."""

from __future__ import annotations

from typing import Any

CONNECTOR = "QlmKvConnector"


def offloading_config(host_kv_bytes: int) -> dict[str, Any]:
    """For `EngineArgs(**...)`: at most `host_kv_bytes` of host memory, all workers together, hold the KV of offloaded requests. They are
    taken at the start (pinned on CUDA). Nothing for 0: then nothing can be offloaded."""
    if host_kv_bytes <= 0:
        return {}
    from vllm.config import KVTransferConfig

    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_connector_module_path="qlm_agent.engines.vllm.scheduler.kv_connector",
            # Loads are in the order of the model's stream; as a consumer vLLM would delay freeing blocks for loads that are not.
            kv_role="kv_producer",
            kv_connector_extra_config={"qlm_host_kv_bytes": host_kv_bytes},
        )
    }
