"""The queue in memory, for tests and the simulator: the port's operations in; answers, wake-ups and a state to compare out."""
