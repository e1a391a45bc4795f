"""Computes the part that one tenant may fill of the memory for requests, of the open requests and of each store."""

from __future__ import annotations

SEVERAL_TENANTS_SHARE = 0.25
"""Share of each bound that one tenant may fill where there are several tenants and `limits.max_tenant_share` is not set."""


class TenantShare:
    """The share of every bound that one tenant may fill. Owners of bounds call it at each use, for the present share.

    The share changes with the configuration, and with the first stored key: from then on keys may be of several tenants.
    """

    def __init__(self, max_share: float | None, num_tenants: int) -> None:
        """
        max_share    `limits.max_tenant_share`
        num_tenants  number of tenants of the keys in the configuration
        """
        self._has_stored_keys = False
        self.change(max_share, num_tenants)

    def change(self, max_share: float | None, num_tenants: int) -> None:
        """Apply a changed configuration."""
        self._max_share, self._num_tenants = max_share, num_tenants

    def note_stored_keys(self) -> None:
        """A key was stored, now or at some time before."""
        self._has_stored_keys = True

    def __call__(self) -> float:
        """The present share, in (0, 1]."""
        return self._max_share or (SEVERAL_TENANTS_SHARE if self.has_several else 1.0)

    @property
    def has_several(self) -> bool:
        """Whether keys may be of several tenants. True with any stored key, since later ones may be of others."""
        return self._has_stored_keys or self._num_tenants > 1
