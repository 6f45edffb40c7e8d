"""Values that all services share: requests, groups, instances, models, SLOs, pauses, errors. Names and figures in; checked values out."""
