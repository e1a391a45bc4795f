"""How long whole answers are kept."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The response cache.

    enabled          for tenants without an option `cache` of their own
    models           names of the models whose answers are cached; empty: all
    ttl_s            seconds that an answer is kept
    max_bytes        of all answers
    """

    enabled: bool = False
    models: tuple[str, ...] = ()
    ttl_s: float = 3600.0
    max_bytes: int = 64 << 20

    def checked(self) -> CacheConfig:
        """This value if its rules hold. Raises ConfigError."""
        if not self.ttl_s > 0:
            raise ConfigError("cache.ttl_s", f"{self.ttl_s} is not positive", "Write enabled: false for no cache.")
        if self.max_bytes <= 0:
            raise ConfigError("cache.max_bytes", f"{self.max_bytes} is not positive")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyConfig:
    """Answers to requests with an Idempotency-Key.

    ttl_s            seconds that an answer is kept for retries; 0: the header has no effect
    """

    ttl_s: float = 86400.0

    def checked(self) -> IdempotencyConfig:
        """This value if its rules hold. Raises ConfigError."""
        if self.ttl_s < 0:
            raise ConfigError("idempotency.ttl_s", f"{self.ttl_s} is negative", "Write 0 for no effect of the header.")
        return self
