"""The agent's decisions: events of the engine, the queue and the clock in, effects out. Pure.

`machine` steps; `pull`, `batch_size`, `evict`, `model_swap` and `restore` decide LLM serving operations (QLM section 5).
"""
