"""Text for logs and errors without the secrets that URLs hold."""

from __future__ import annotations

import re

MASK = "***"
_API_KEY = re.compile(r"\b(qlm_[0-9a-f]{8}_)[0-9a-f]{16,}")
_SECRETS = re.compile(
    r"""(?P<before> :// | [?&](?:\w+_)?(?:password|passwd|secret|token|key|api[-_]?key)= )
        (?: (?<=://) [^\s'"]* (?=@) | (?<==) [^\s'"&]+ )""",
    re.VERBOSE | re.IGNORECASE,
)


def masked(text: str) -> str:
    """The text with the user information of URLs ("redis://:secret@host"), and with passwords and keys of their queries, as "***"; so are
    API keys behind their ids."""
    return _API_KEY.sub(rf"\g<1>{MASK}", _SECRETS.sub(rf"\g<before>{MASK}", text))
