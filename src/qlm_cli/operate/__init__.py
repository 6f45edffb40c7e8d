"""Commands of an operator: the state of a queue and its requests, pauses, health, repair."""
