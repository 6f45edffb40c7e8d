"""The agent: one per instance. It pulls from its virtual queue, drives its engine and sends the tokens."""
