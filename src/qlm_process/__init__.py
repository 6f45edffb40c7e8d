"""What every QLM process needs to live: settings, logs, traces, metrics, a gRPC server, leases and signals."""
