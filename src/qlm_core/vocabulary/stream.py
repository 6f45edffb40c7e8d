"""Entries of the queue's streams."""

from __future__ import annotations

EntryId = tuple[int, int]
"""Id of an entry: milliseconds of the server's clock, and a sequence number within one. Sorts as the stream does."""


def entry_id_of(text: str) -> EntryId:
    """The two numbers of an entry id "<ms>-<n>"; "" and "0" are before all. Raises ValueError for anything else."""
    ms, _, sequence = text.partition("-")
    return (int(ms or "0"), int(sequence or "0"))
