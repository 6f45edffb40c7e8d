"""What came of requests and of the predictions that clients were told, for Prometheus and `qlm top`."""
