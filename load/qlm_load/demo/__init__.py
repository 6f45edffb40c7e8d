"""The demo: a cluster of its own, a replay with kills half way, and the client's account of it."""
