"""What the machine knows of the way to the queue: when a failed call may be repeated, and when it may be trusted again."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_planner.policy import Policy


@dataclass(slots=True, kw_only=True)
class Connection:
    """`grace_until_s`: until then nothing is taken from an agent. A new leader begins with a whole lease period: it does not know how
    long the server was away before, and agents still write what they held meanwhile. `answered_s`: the last answer of any call."""

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
        """Calls that fail together count once."""
        if self.up or now_s >= self.retry_s:
            pause_s = min(self.policy.retry_max_s, self.policy.retry_first_s * 2.0 ** min(self.failures, 30))
            self.failures += 1
            self.retry_s = now_s + pause_s

    def answered(self, now_s: float) -> bool:
        """A call was answered; True if that ends a series of failures.

        Grace follows if nothing was answered for a third of a lease. Less is no outage that could have cost an agent its lease (a lease is
        renewed at least so often that more than that is left of it), and single failed calls must not put off recovery for ever."""
        silent_s = now_s - self.answered_s
        self.answered_s = now_s
        if self.up:
            return False
        self.failures = 0
        if silent_s >= self.policy.lease_ttl_s / 3.0:
            self.grace_until_s = now_s + self.policy.lease_ttl_s
        return True
