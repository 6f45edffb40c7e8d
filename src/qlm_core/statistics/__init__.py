"""Distributions and output lengths. Samples and moments in; quantiles, tails and predictions of lengths out."""
