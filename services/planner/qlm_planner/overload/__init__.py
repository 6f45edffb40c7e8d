"""Overload: advice on the fleet (QLM A.3, a; ADR 17), and shedding.

advice_question    board and demand as one problem of the search
advice             the smallest fleet whose orders meet the SLOs
shedding           fails late requests of the lowest value
"""
