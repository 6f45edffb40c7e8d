"""How fast instances are: one factor on the steps of a model, and one on its loads."""
