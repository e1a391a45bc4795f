"""Holds the limits of one scheduler (`SchedulerConfig`), taken from the engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one scheduler. Fields have the names and meaning that they have in `engine.config.EngineConfig` and
    `core.model_info.ModelInfo`.

    max_waiting_bytes  memory that waiting requests may hold; in neither of those classes
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int = 1024
    max_waiting_bytes: int = 256 << 20
    max_waiting_per_tenant: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    queue_policy: str = "priority"
    enable_chunked_prefill: bool = True
    depth: int = 1
    costly_context: int = 0

    @property
    def uncommitted_tokens(self) -> int:
        """Tokens that may be planned for one sequence and not yet committed."""
        step = self.max_num_batched_tokens if self.enable_chunked_prefill else self.max_model_len
        return self.depth * step
