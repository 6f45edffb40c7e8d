"""Engine `openai`: any server of OpenAI's completions API as an instance, vLLM's above all."""
