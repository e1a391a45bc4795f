"""Facts of a loaded model that need no tensor: shapes, limits, digests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from headrace.core.kvgroup import KvGroup
from headrace.core.numerics import WEIGHTS, numerics_digest

LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of one loaded model on one replica.

    max_model_len     resolved: never more than the KV pool can hold for one sequence
    eos_token_ids     all end tokens that any file of the model's folder names
    num_blocks        per KV group, pad block included
    weight_bytes      read by one decode step (for MBU)
    costly_context    tokens of context from which on a prompt token's attention takes longer than its matrix products; 0: never. Does not
                      cross the wire
    sampling_defaults from generation_config.json
    digests           hex content digests: model (a sample of the weights), tokenizer, template; and kv_dtype, the name of the KV cache's
                      element type (not a digest)
    numerics          facts that equal results depend on (`core.numerics`); "weights" is empty until all weight bytes are hashed
    decided           the choices made at start with their reasons, one line each, for people
    queue_policy      tells a gateway whether a request's priority has an effect; "": not known
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_groups: tuple[KvGroup, ...]
    block_size: int
    num_blocks: tuple[int, ...]
    dtype: str
    weight_bytes: int
    costly_context: int = 0
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    numerics: dict[str, str] = field(default_factory=dict)
    decided: tuple[str, ...] = ()
    queue_policy: str = ""

    @property
    def numerics_digest(self) -> str:
        """Equal where equal requests give equal results; "" while the weights' digest is not known."""
        return numerics_digest(self.numerics)

    @property
    def version(self) -> str:
        """A hex digest that changes with the content digests, the numerics and the end tokens."""
        facts = [f"{name}={value}" for part in (self.digests, self.numerics) for name, value in sorted(part.items())]
        facts.append(f"eos_token_ids={sorted(self.eos_token_ids)}")
        return blake2b("\n".join(facts).encode(), digest_size=16, person=b"headrace-version").hexdigest()

    def with_weights_digest(self, digest: str) -> ModelInfo:
        return replace(self, numerics={**self.numerics, WEIGHTS: digest})
