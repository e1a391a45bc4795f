"""Computes the part that one tenant may fill of every bound."""

from __future__ import annotations

SEVERAL_TENANTS_SHARE = 0.25
"""Where `limits.max_tenant_share` is not set."""


class TenantShare:
    """Changes with the configuration, and with the first stored key: from then on keys may be of several tenants."""

    def __init__(self, max_share: float | None, num_tenants: int) -> None:
        self._has_stored_keys = False
        self.change(max_share, num_tenants)

    def change(self, max_share: float | None, num_tenants: int) -> None:
        self._max_share, self._num_tenants = max_share, num_tenants

    def note_stored_keys(self) -> None:
        self._has_stored_keys = True

    def __call__(self) -> float:
        return self._max_share or (SEVERAL_TENANTS_SHARE if self.has_several else 1.0)

    @property
    def has_several(self) -> bool:
        """True with any stored key, since later ones may be of others."""
        return self._has_stored_keys or self._num_tenants > 1
