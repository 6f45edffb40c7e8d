"""The data of server-sent events, from bytes in any portions (HTML standard, 9.2.6)."""

from __future__ import annotations

EVENT_BYTES_MAX = 4 << 20
BESIDE_BYTES_MAX = 2000
BOM = b"\xef\xbb\xbf"
FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class EventStream:
    """The events of one response. `feed` raises ValueError for an event without an end."""

    def __init__(self) -> None:
        self._line = b""  # that has no end yet
        self._data: list[bytes] = []  # of the event that has none
        self._beside = b""
        self._begun = False

    @property
    def beside(self) -> str:
        """The beginning of data that is no event: a server that breaks off gives its reason there."""
        rest = b"" if self._line.startswith(FIELDS) else self._line
        return (self._beside + rest)[:BESIDE_BYTES_MAX].decode(errors="replace").strip()

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole by now."""
        data = self._line + data
        if not self._begun:
            if len(data) < len(BOM) and BOM.startswith(data):
                self._line = data
                return []
            data, self._begun = data.removeprefix(BOM), True
        lines = data.splitlines(keepends=True)
        self._line = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""  # "\r" may be half of "\r\n"
        events = []
        for line in lines:
            line = line.rstrip(b"\r\n")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            elif line and not line.startswith(FIELDS) and len(self._beside) < BESIDE_BYTES_MAX:
                self._beside += line[:BESIDE_BYTES_MAX] + b"\n"
        if len(self._line) + sum(map(len, self._data)) > EVENT_BYTES_MAX:
            raise ValueError(f"an event of more than {EVENT_BYTES_MAX} bytes")
        return events

    def end(self) -> list[bytes]:
        """The last event of a stream that ends without the empty line after it; a line that broke off is none."""
        if self._line.startswith(FIELDS) and not self._line.endswith(b"\r"):
            self._line = b""
        return self.feed(b"\n\n")
