"""`python -m benchmarks queue`: costs of the live system, measured with real processes and tracing on."""
