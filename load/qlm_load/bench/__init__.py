"""`python -m qlm_load bench queue`: what the live system costs, measured with real processes and tracing on."""
