"""The gateway: takes requests, checks and admits them, puts them in the global queue and streams their tokens back."""
