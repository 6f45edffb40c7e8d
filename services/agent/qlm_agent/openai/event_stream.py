"""Server-sent events, as far as completions use them: the data of each event, from bytes in any portions."""

from __future__ import annotations

LINE_BYTES_MAX = 4 << 20
BESIDE_BYTES_MAX = 2000
FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class EventStream:
    """The events of one response. `feed` raises ValueError for a line without an end."""

    def __init__(self) -> None:
        self._rest = b""
        self._beside = b""

    @property
    def beside(self) -> str:
        """The beginning of what is no event: servers that break off say there why."""
        rest = b"" if self._rest.startswith(FIELDS) else self._rest
        return (self._beside + rest)[:BESIDE_BYTES_MAX].decode(errors="replace").strip()

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole by now. Each is one line in every server there is, so a line is an event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError(f"an event of more than {LINE_BYTES_MAX} bytes")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                events.append(line[5:].strip())
            elif line and not line.startswith(FIELDS) and len(self._beside) < BESIDE_BYTES_MAX:
                self._beside += line[:BESIDE_BYTES_MAX] + b"\n"
        return events
