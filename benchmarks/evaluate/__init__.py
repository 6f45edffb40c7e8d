"""Papers' claims about schedulers inside an engine, measured on the simulated engine."""
