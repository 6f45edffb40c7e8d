"""What every process does with the queue: connect, keep its clock and leases, read its state for predictions."""
