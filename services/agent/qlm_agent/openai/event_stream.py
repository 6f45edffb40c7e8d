"""Server-sent events, as far as completions use them: the data of each event, from bytes in any portions."""

from __future__ import annotations

LINE_BYTES_MAX = 4 << 20


class EventStream:
    """The events of one response. `feed` raises ValueError for a line without an end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole by now. Each is one line in every server there is, so a line is an event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError(f"an event of more than {LINE_BYTES_MAX} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
