"""Identity of callers: keys, their file, and the rights of a key."""
