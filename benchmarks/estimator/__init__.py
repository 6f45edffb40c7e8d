"""The bench of the estimator: predictions made at arrival by the estimator's own learners and formulas, against the simulated engine."""
