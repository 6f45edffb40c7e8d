"""Valkey of a wheel as a child process: a state folder in, an address out."""
