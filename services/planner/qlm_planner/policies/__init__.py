"""Comparison policies, live and simulated (`planner.policy`): what QLM section 8 and load balancers do, behind one interface.

Under a policy of these, `qlm_planner.groups.cheapest_place` places nothing and no objective weighs anything: the policy says where a
request goes and whether the order is changed later (`baseline.Baseline`). `selection.baseline_of` makes the one that the settings name."""
