"""A workload sent through the SDK, and the client's own ledger of it: requests in, a summary out."""
