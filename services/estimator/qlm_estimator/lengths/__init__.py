"""How long answers will be: distributions by class, and a model of single requests."""
