"""The expected wait of a request: the waits that the planner publishes, and the request's own part."""
