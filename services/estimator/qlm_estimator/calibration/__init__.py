"""How far predictions are off, and how sure they are: bias and intervals that are learned from what came of them."""
