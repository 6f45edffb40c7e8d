"""Decisions about serving operations that agents and planner share. Runs and heads in; batch size and victims out."""
