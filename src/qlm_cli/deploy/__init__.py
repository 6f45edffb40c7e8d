"""`qlm deploy`: device maps of a model over unlike devices, their files and their picture."""
