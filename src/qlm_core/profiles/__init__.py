"""Figures of hardware, models and workloads. Data sheets, measurements and learned rows in; one snapshot of profiles out."""
