"""Workloads: traces, shapes and seeds in; requests with arrivals, lengths and SLOs out."""
