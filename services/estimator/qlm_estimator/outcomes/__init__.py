"""Outcomes of requests and of the predictions that clients got, for Prometheus and `qlm top`."""
