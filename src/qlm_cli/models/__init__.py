"""`qlm models`: small models on disk, for real engines on any machine, without a hub."""
