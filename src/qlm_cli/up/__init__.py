"""`qlm up`: a whole cluster on this machine, as real processes under supervision."""
