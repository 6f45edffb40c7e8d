"""Every key of a queue, built and documented in one place.

All keys of a queue share the hash tag `{<queue>}`, so that a queue lives on one Redis Cluster slot. The scripts build the same names
from the prefix (lua/prelude.lua); `tests/conformance` finds a key that is missing here.

    :queue                          stream: the global queue, one entry per live request: `r` = the Request, `k` = the key of its hash;
                                    the entry id is the queue id
    :req:<tenant>:<request_id>      hash, a live request: `f` what never changes, "<16 bytes digest><queue id> <acceptance number>
                                    <acceptance (ms)> <prompt tokens> <SLO class>"; `s` "<state><attempts> <failed attempts>
                                    <first pull (ms)> <first output (ms)> <1: the output is text, L: with logprobs> <owner incarnation>"
                                    (empty where there is none); `w` gateway, `g` group, `x` expiry (ms), `b` counted bytes of record and
                                    body
    :result:<tenant>:<request_id>   string, TTL: "<16 bytes digest><state><attempts> <produced bytes> <queue id> <bytes of incarnation>
                                    <incarnation>\\n" + Result; "erased" where it was
    :progress:<queue id>            string: output so far
    :logprobs:<queue id>            string, of a request that wants them: a `Result.logprobs` field for each of its tokens
    :group:<gid>                    sorted set: waiting queue ids by acceptance number
    :group_meta:<gid>               hash: live, prompt_tokens (waiting), first_deadline, last_deadline, slo_least (s), and the planner's
                                    own fields
    :groups                         hash: id of each group with live requests -> `+` and the virtual queue that it is on, or `-` and the
                                    one that it was on last
    :vq:<instance>                  list: group ids, first served first; `unassigned` holds groups that no instance can serve now
    :vq_version                     hash: instance -> version of its virtual queue
    :running:<incarnation>          set: queue ids that an agent incarnation owns
    :lease:<role or incarnation>    string, PX: "<fence>:<nonce>"
    :fence:<role or instance>       counter: the last fence given
    :address                        hash: role -> "host:port" of the last leader
    :instances                      hash: instance -> serialized Instance
    :registered                     hash: instance -> its newest incarnation
    :incarnations                   set: incarnations that may own requests
    :frames:<gateway>               stream, trimmed, TTL: `f` = FrameBatch
    :ctl:<instance>                 stream, trimmed: `k` kind, `i` queue id, `a` attempt
    :events                         stream, trimmed: `e` = RequestEvents
    :acceptance                     counter: the last acceptance number
    :expiry                         sorted set: queue ids by expiry (ms)
    :kept                           sorted set of the counted results, by the end of their windows (ms):
                                    "<bytes> <queue id> <length of the SLO class> <SLO class><tenant>:<request_id>"
    :counts                         hash: live, unplaced, running, `t:<tenant>`, `c:<class>`: live requests; `b`, `bt:<tenant>`,
                                    `bc:<class>`: bytes of live requests and of results in their window
    :paused                         hash: `m:<model>` or `t:<tenant>`, of which nothing is pulled -> since when (ms)
    :plan_version                   string: version of the last plan applied
    :profiles                       hash: version, body: the profile snapshot
    :waits                          string: PlannedWaits, the waits that the planner predicts
    :version                        string: the version of the data (redis/calls.py)
    :damaged:<rest of a key>        any type, TTL: a key that a repair set aside (lua/repair.lua)
    :damage_count                   counter: findings that repairs have mended
"""

from __future__ import annotations

from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey

_ESCAPES = str.maketrans({"%": "%25", ":": "%3A", "{": "%7B", "}": "%7D"})


def escape(name: str) -> str:
    """A tenant, request id or queue name as part of a key: `%`, `:`, `{` and `}` percent-encoded."""
    return name.translate(_ESCAPES)


def unescape(name: str) -> str:
    """The inverse of `escape`."""
    if "%" not in name:
        return name
    return name.replace("%7D", "}").replace("%7B", "{").replace("%3A", ":").replace("%25", "%")


class Keys:
    """The keys of one queue. `prefix`: what all of them begin with."""

    def __init__(self, queue_name: str) -> None:
        self.prefix = "{" + escape(queue_name) + "}"
        self._request_prefix = len(self.prefix) + len(":req:")

    def __call__(self, *parts: str) -> str:
        """A key of the table above: `keys("vq", "a100-0")`."""
        return ":".join((self.prefix, *parts))

    def request(self, key: RequestKey) -> str:
        return self("req", escape(key.tenant), escape(key.request_id))

    def result(self, key: RequestKey) -> str:
        return self("result", escape(key.tenant), escape(key.request_id))

    def pause(self, kind: PauseKind, name: str) -> str:
        """A field of `paused`."""
        return f"m:{name}" if kind is PauseKind.MODEL else f"t:{escape(name)}"

    def request_key(self, hash_key: str) -> RequestKey:
        """The RequestKey of the key of a request's hash."""
        tenant, request_id = hash_key[self._request_prefix :].split(":")
        return RequestKey(unescape(tenant), unescape(request_id))
