"""Who calls: keys, the file that holds them, and what a key may do."""
