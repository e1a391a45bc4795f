"""Tells the failures of a server from those that the requests of one tenant bring about.

Some requests make a server fail each time. Sent by one tenant, they would open the server's circuit for all tenants. A failure is the
tenant's while the server answered another tenant within `OTHERS_S` and has not failed for another one since. A tenant alone at a server
cannot be distinguished from it: each failure is the server's then.
"""

from __future__ import annotations

OTHERS_S = 60.0
"""Seconds for which an answer to one tenant shows that the failures of another one are not the server's."""


class TenantFailures:
    """The answers and failures of one server, by tenant. `now` is in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._tenant_to_answered_at: dict[bytes, float] = {}
        """The last two tenants."""
        self._failing: bytes | None = None
        self._is_failing_several = False

    def answered(self, tenant: bytes, now: float) -> None:
        """Note an answer."""
        self._failing, self._is_failing_several = None, False
        kept = [each for each in self._tenant_to_answered_at.items() if each[0] != tenant]
        self._tenant_to_answered_at = dict([*kept[-1:], (tenant, now)])

    def is_tenants(self, tenant: bytes, now: float) -> bool:
        """Note a failure. Returns whether it is the tenant's."""
        self._is_failing_several = self._is_failing_several or self._failing not in (None, tenant)
        self._failing = tenant
        others = [at for other, at in self._tenant_to_answered_at.items() if other != tenant]
        return not self._is_failing_several and any(now - at < OTHERS_S for at in others)
