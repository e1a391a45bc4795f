"""The description of a decoder, as frozen values: filled from config.json by one file per architecture, built by `models.decoder`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headrace.tensor.layers.attention import AttentionNames, AttentionSpec
from headrace.tensor.layers.mlp import MlpNames, MlpSpec
from headrace.tensor.layers.moe import MoeNames, MoeSpec
from headrace.tensor.layers.rope import LongRopeScaling

ATTENTION_SHARE = 0.75
"""Speed of prefill attention as a share of that of matrix products, in multiplications per second (docs/experiments.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of the stored tensors, without ".weight". The names of a layer's tensors follow the prefix `layer`.

    attention_output_norm, mlp_output_norm  norms of a branch's output, before the addition to the residual; None: no such norm
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention_output_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str | None = None
    attention: AttentionNames = field(default_factory=AttentionNames)
    mlp: MlpNames = field(default_factory=MlpNames)
    moe: MoeNames = field(default_factory=MoeNames)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """
    max_positions    longest context of the checkpoint, its rotary scaling included; after `within`, the longest context served
    norm_plus        added to stored norm weights (Gemma stores w - 1)
    embedding_scale  multiplies the embeddings
    is_tied          the head is the embedding table, unless the checkpoint stores a head of its own
    """

    vocab_size: int
    hidden_size: int
    max_positions: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    is_tied: bool
    norm_plus: float = 0.0
    embedding_scale: float = 1.0
    names: TensorNames = field(default_factory=TensorNames)

    def flops(self, vocab_size: int) -> tuple[int, int]:
        """Operations of one token's matrix products, the head's included; and of its attention for each token of its context, in layers
        without a window."""
        products, attention = self._multiplications()
        return 2 * (products + self.hidden_size * vocab_size), 2 * attention

    def costly_context(self) -> int:
        """Context length at which a prompt token's attention takes as long as its matrix products; 0 if every layer has a window."""
        products, attention = self._multiplications()
        return int(ATTENTION_SHARE * products / attention) if attention else 0

    def _multiplications(self) -> tuple[int, int]:
        """One token's in all layers, and those of its attention for each token of its context."""
        products = attention = 0
        for layer in self.layers:
            own, mlp = layer.attention, layer.mlp
            features = mlp.size if isinstance(mlp, MlpSpec) else mlp.top_k * mlp.size
            products += self.hidden_size * (2 * (own.heads + own.kv_heads) * own.head_dim + 3 * features)
            attention += 0 if own.window else 2 * own.heads * own.head_dim
        return products, attention

    @property
    def longrope(self) -> LongRopeScaling | None:
        """None also where short and long factors are equal."""
        scalings = (layer.attention.rope.scaling for layer in self.layers)
        found = next((scaling for scaling in scalings if isinstance(scaling, LongRopeScaling)), None)
        return None if found is None or found.short_factors == found.long_factors else found

    @property
    def default_positions(self) -> int:
        """With LongRoPE the context of the first training: its authors' code and transformers take the long factors for longer sequences
        alone.
        """
        return self.max_positions if self.longrope is None else min(self.longrope.original_positions, self.max_positions)

    def within(self, max_model_len: int) -> DecoderSpec:
        """The same model for contexts of up to `max_model_len` tokens, without windows of at least that length, which hide no token."""
        layers = tuple(
            replace(layer, attention=replace(layer.attention, window=None)) if (layer.attention.window or 0) >= max_model_len else layer
            for layer in self.layers
        )
        return replace(self, layers=layers, max_positions=max_model_len)
