"""`qlm top`: the whole cluster, live in the terminal."""
