"""Requests into groups, and groups to their first place.

assignment        the group that a request joins
cheapest_place    the cheapest place of a new group
ranks             groups that come before or behind others of their band
split             groups that are too large where they stand
"""
