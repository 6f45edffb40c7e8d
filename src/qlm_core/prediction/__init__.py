"""The one model of an engine and its queues. Views of virtual queues and profiles in; first and last tokens as distributions out."""
