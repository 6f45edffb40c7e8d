"""Foundation of every QLM process: settings, logs, traces, metrics, a gRPC server, leases and signals."""
