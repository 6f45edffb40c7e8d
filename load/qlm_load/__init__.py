"""Workloads, trace replay with the client's own ledger, and the demo that kills processes on the way."""
