"""Comparison policies, live and simulated (`planner.policy`): the baselines of QLM section 8 and of load balancers, behind one interface.

A policy (`baseline.Baseline`) replaces `qlm_planner.groups.cheapest_place` and the objective: it assigns requests to queues, and may change
the order later. `selection.baseline_of` creates the one that the settings name."""
