"""Metrics, and spans of requests and of LLM serving operations."""
