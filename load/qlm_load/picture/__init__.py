"""The picture of a run: virtual queues, models and processes over time, as PNG and as a page of its own."""
