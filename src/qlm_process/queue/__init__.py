"""Shared work of processes on the queue: connect, keep its clock and leases, read its state for predictions."""
