"""Virtual time, network, server, processes and seeded chance: what a simulated cluster lives in."""
