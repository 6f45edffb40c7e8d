"""Bias and intervals of predictions, learned from the actual times."""
