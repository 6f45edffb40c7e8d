"""vLLM behind the engine port: child processes with an engine each, and what runs inside of them."""
