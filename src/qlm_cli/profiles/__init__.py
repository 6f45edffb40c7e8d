"""Commands of profiles: an engine measured here; a queue's rows shown, exported and imported."""
