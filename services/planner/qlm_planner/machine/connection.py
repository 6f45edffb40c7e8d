"""The connection to the queue: when failed calls are repeated, and when leases may count as lost."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_planner.policy import Policy


@dataclass(slots=True, kw_only=True)
class Connection:
    """`grace_until_s`: until then nothing is reclaimed from an agent. A new leader starts with a whole lease period: the server may have
    been away, and agents still write. `answered_s`: the last answer of any call."""

    policy: Policy
    grace_until_s: float
    answered_s: float
    failures: int = 0
    retry_s: float = 0.0

    @property
    def up(self) -> bool:
        return self.failures == 0

    def may_call(self, now_s: float) -> bool:
        return self.up or now_s >= self.retry_s

    def in_grace(self, now_s: float) -> bool:
        return now_s < self.grace_until_s or (not self.up and now_s - self.answered_s >= self.policy.lease_ttl_s / 3.0)

    def failed(self, now_s: float) -> None:
        """Schedules the next call. Calls that fail together count once."""
        if self.up or now_s >= self.retry_s:
            pause_s = min(self.policy.retry_max_s, self.policy.retry_first_s * 2.0 ** min(self.failures, 30))
            self.failures += 1
            self.retry_s = now_s + pause_s

    def answered(self, now_s: float) -> bool:
        """Records an answer; True if it ends a series of failures.

        Grace follows after a third of a lease without answers. A shorter outage costs no agent its lease, which is renewed earlier, and a
        single failed call must not delay recovery."""
        silent_s = now_s - self.answered_s
        self.answered_s = now_s
        if self.up:
            return False
        self.failures = 0
        if silent_s >= self.policy.lease_ttl_s / 3.0:
            self.grace_until_s = now_s + self.policy.lease_ttl_s
        return True
