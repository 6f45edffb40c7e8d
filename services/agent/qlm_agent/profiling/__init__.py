"""Profiling an engine: runs of known sizes through the engine port, and the hardware profile that explains how long they took."""
