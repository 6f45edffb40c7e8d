"""Chooses policies for a user's own traffic, in virtual time."""
