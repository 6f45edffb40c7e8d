"""vLLM behind the engine port: child processes with an engine each, and the code inside them."""
