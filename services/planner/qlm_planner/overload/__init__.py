"""More load than the instances serve in time: advice on the fleet (QLM A.3, a; docs/adr/0017) and shedding.

demand             arrivals by group key
advice_question    board and demand as one problem of the search
advice             the smallest fleet whose orders are enough
shedding           late requests that are failed, lowest value first
"""
