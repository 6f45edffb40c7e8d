"""The environment of a simulated cluster: virtual time, network, server, processes and seeded chance."""
