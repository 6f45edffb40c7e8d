"""Faults by seed, and the invariants that hold through them: a seed in, a transcript and violations out."""
