"""`python -m benchmarks queue`: what the live system costs, measured with real processes and tracing on."""
