"""Inside an engine process: vLLM, its runs, prompts and sleep."""
