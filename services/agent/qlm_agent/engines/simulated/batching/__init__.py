"""The batch of the simulated engine, step by step: runs and an engine policy come in; tokens, seconds and KV blocks of each step go out.
Pure: times are passed in."""
