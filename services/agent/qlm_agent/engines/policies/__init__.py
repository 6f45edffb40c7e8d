"""The policies inside an engine: the port, and one module a family."""
