"""The shared vocabulary of QLM and its prediction formulas. Pure: no IO, no clock, no randomness."""
