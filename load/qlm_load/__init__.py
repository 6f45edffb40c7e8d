"""Workloads, trace replay with the client's own ledger, and the demo that kills processes during it."""
