"""`python -m benchmarks gateway`: costs of a gateway's OpenAI API over HTTP, measured with real processes and tracing on."""
