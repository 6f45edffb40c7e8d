"""From a pulled request to an engine's run, and from its output to frames, progress and results of the queue."""
