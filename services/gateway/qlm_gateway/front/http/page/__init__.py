"""The page for operators: reads of the cluster and of one request's events come in, HTML, JSON and metrics go out. No prompt or output is
in them."""
