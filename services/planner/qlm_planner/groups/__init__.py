"""Request groups: which group a request joins, and a new group's first position.

assignment        assigns requests to groups
cheapest_place    the cheapest position of a new group
ranks             groups that precede or follow others of their band
split             splits groups above their limit
"""
