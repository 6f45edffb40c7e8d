"""The scheduler that QLM puts into vLLM: order, preemption, and KV that moves to host memory and back."""
