"""Engine processes: the agent's end of each, the template that forks them, and the loop inside of one."""
