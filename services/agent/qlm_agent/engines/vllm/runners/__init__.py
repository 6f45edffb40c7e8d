"""Inside an engine process: vLLM in this process or through AsyncLLM, behind one interface."""
