"""Facts of a loaded model that need no tensor (shapes, limits, digests), and whether two replicas compute the same results.

A replica's numerics are named facts (weights, dtype, kernels, ...), sent in its first frame; a stream of one replica may be resumed at
another with equal numerics. "weights", a digest of all weight bytes and of config.json, takes seconds per gigabyte: until it is known the
fact is empty, and no stream is resumed at that replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from typing import Any

WEIGHTS = "weights"


LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose keys and values live in blocks of one shape and one lifetime.

    kv_heads     held by this rank
    scale_bytes  beside each key and each value of a head; 0 where the cache is not rounded
    window       tokens a query sees, itself included; None = everything before it
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None = None
    scale_bytes: int = 0

    def block_bytes(self, block_size: int) -> int:
        return len(self.layers) * 2 * block_size * self.kv_heads * (self.head_dim * self.dtype_bytes + self.scale_bytes)

    def tokens_needed(self, num_tokens: int) -> int:
        """The most tokens of the sequence that must be in the cache at once."""
        return num_tokens if self.window is None else min(num_tokens, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """max_model_len     resolved: never more than the KV pool can hold for one sequence
    eos_token_ids     all end tokens that any file of the model's folder names
    num_blocks        per KV group, pad block included
    weight_bytes      read by one decode step (for MBU)
    costly_context    tokens of context from which on a prompt token's attention takes longer than its matrix products; 0: never. Does not
                      cross the wire
    token_flops, pair_flops  of one token's matrix products, and of its attention for each token of its context. Only for the engine
    peak_*            as in `core.load.LoadSnapshot`. Only for the engine
    sampling_defaults from generation_config.json
    digests           hex content digests: model (a sample of the weights), tokenizer, template; and kv_dtype, the name of the KV cache's
                      element type (not a digest)
    numerics          facts that equal results depend on
    decided           the choices made at start with their reasons, one line each, for people
    adapters          name -> hex digest of those that may be asked for now
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
    token_flops: int = 0
    pair_flops: int = 0
    peak_read_bytes_per_s: float = 0.0
    peak_flops_per_s: float = 0.0
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    numerics: dict[str, str] = field(default_factory=dict)
    decided: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    queue_policy: str = ""

    @property
    def numerics_digest(self) -> str:
        """Equal where equal requests give equal results; "" while the weights' digest is not known."""
        return numerics_digest(self.numerics)

    @property
    def version(self) -> str:
        facts = [f"{name}={value}" for part in (self.digests, self.numerics) for name, value in sorted(part.items())]
        facts.append(f"eos_token_ids={sorted(self.eos_token_ids)}")
        return blake2b("\n".join(facts).encode(), digest_size=16, person=b"headrace-version").hexdigest()

    def with_weights_digest(self, digest: str) -> ModelInfo:
        return replace(self, numerics={**self.numerics, WEIGHTS: digest})

    def with_adapters(self, adapters: Mapping[str, str]) -> ModelInfo:
        return replace(self, adapters=dict(adapters))


TEXT_FILES: Mapping[str, tuple[str, ...]] = {
    "tokenizer": ("tokenizer.json",),
    "template": ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"),
    "special tokens": ("special_tokens_map.json", "added_tokens.json"),
}


def text_digests(files: Mapping[str, bytes]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for kind, names in TEXT_FILES.items():
        state = sha256()
        present = [name for name in names if name in files]
        for name in present:
            state.update(f"{name}\0{len(files[name])}\0".encode())
            state.update(files[name])
        digests[kind] = state.hexdigest() if present else ""
    return digests


Numerics = Mapping[str, str]


def numerics_digest(facts: Numerics) -> str:
    if not facts.get(WEIGHTS):
        return ""
    state = blake2b(digest_size=16, person=b"headrace-numeric")
    for name, value in sorted(facts.items()):
        for part in (name.encode(), value.encode()):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def why_not_resume(first: Numerics, second: Numerics) -> str:
    """Why a stream of a replica with the facts `first` may not be resumed at one with `second`; "" where it may be."""
    for name, facts in (("first", first), ("second", second)):
        if not facts.get(WEIGHTS):
            return f"the weights of the {name} replica are not hashed yet"
    differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    return "; ".join(f"{name}: {first.get(name, 'not said')} and {second.get(name, 'not said')}" for name in differing)


def may_resume(first: str, second: str) -> bool:
    """The resumed stream has the same tokens for certain only where both replicas run with `deterministic`, which is one of the facts:
    without it the logits depend on the other sequences of a batch.
    """
    return bool(first) and first == second
