"""The simulated engine: a pure core that is accurate to the step, and a shell that runs it in real time."""
