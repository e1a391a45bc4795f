"""The part that one tenant may fill of the memory for requests, of the open requests and of each store."""

from __future__ import annotations

SEVERAL_TENANTS_SHARE = 0.25
"""Share of each bound that one tenant may fill where there are several tenants and `limits.max_tenant_share` is not set."""


class TenantShare:
    """Share of each bound that one tenant may fill, the same of all. Whatever has such a bound asks for the share at each use.

    It follows the configuration, and the first stored key: keys may be of several tenants from then on.
    """

    def __init__(self, max_share: float | None, num_tenants: int) -> None:
        """
        max_share    `limits.max_tenant_share`
        num_tenants  of the keys in the configuration
        """
        self._has_stored_keys = False
        self.change(max_share, num_tenants)

    def change(self, max_share: float | None, num_tenants: int) -> None:
        """The configuration has changed."""
        self._max_share, self._num_tenants = max_share, num_tenants

    def note_stored_keys(self) -> None:
        """A key was stored, now or at some time before."""
        self._has_stored_keys = True

    def __call__(self) -> float:
        """In (0, 1], at this moment."""
        return self._max_share or (SEVERAL_TENANTS_SHARE if self.has_several else 1.0)

    @property
    def has_several(self) -> bool:
        """Whether keys may be of several tenants: stored ones may, whatever they are of now."""
        return self._has_stored_keys or self._num_tenants > 1
