"""Describes a model by its sizes, and computes its weights, KV cache and FLOPs from them."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one weight, without scales."""

KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}


INT4_SCALE_BYTES = 20 / 8 / 128
"""Bytes for each int4 weight of a scale in 16 bits and a zero point in 4, in groups of 128."""


@dataclass(frozen=True, slots=True)
class WeightSizes:
    layer: float
    table: float


def sizes_of(dtype: str) -> WeightSizes:
    size = WEIGHT_BYTES[dtype]
    return WeightSizes(layer=size + (INT4_SCALE_BYTES if dtype == "int4" else 0.0), table=max(size, 2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): a token's keys and values are one short vector per layer, the same for all heads.

    q_rank    width of the compressed query; 0: the query is not compressed
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """mlp_size            inner width of a dense feed-forward block
    expert_size         inner width of an expert; shared_size: of the experts that compute every token, together
    window              tokens that one of the `num_window_layers` layers sees; 0: every layer sees the whole context
    is_assumed          its family is not known, and its sizes were read as those of Llama's
    stored              sizes of the weights as a checkpoint stores them; None: those of the dtype that is asked about
    """

    name: str
    num_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    mlp_size: int
    is_gated: bool = True
    is_tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0
    num_dense_layers: int = 0
    window: int = 0
    num_window_layers: int = 0
    latent: LatentAttention | None = None
    is_encoder: bool = False
    is_assumed: bool = False
    stored: WeightSizes | None = None

    # -- weights -----------------------------------------------------------------------------------------------------------------

    @property
    def num_params(self) -> int:
        """Biases are left out: less than a thousandth."""
        return self.num_table_params + self.num_layer_params

    @property
    def num_table_params(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied or self.is_encoder else 2)
        return embeddings + (self.max_positions * self.hidden_size if self.is_encoder else 0)

    @property
    def num_layer_params(self) -> int:
        return self._num_read_layer_params(self.num_experts)

    @property
    def num_active_params(self) -> int:
        """Weights that one token is multiplied with: its own experts', and not the embedding table."""
        return self._num_head_params + self._num_read_layer_params(self.experts_per_token)

    def sizes(self, dtype: str) -> WeightSizes:
        return self.stored or sizes_of(dtype)

    def weights_bytes(self, dtype: str) -> float:
        sizes = self.sizes(dtype)
        return self.num_layer_params * sizes.layer + self.num_table_params * sizes.table

    def read_bytes(self, dtype: str, num_tokens: float) -> float:
        """Bytes that a step over `num_tokens` tokens reads; they choose experts independently."""
        chosen = 0.0
        if self.num_experts:
            chosen = self.num_experts * (1.0 - (1.0 - self.experts_per_token / self.num_experts) ** num_tokens)
        sizes = self.sizes(dtype)
        return self._num_head_params * sizes.table + self._num_read_layer_params(chosen) * sizes.layer

    @property
    def _num_head_params(self) -> int:
        return 0 if self.is_encoder else self.vocab_size * self.hidden_size

    def _num_read_layer_params(self, num_experts: float) -> int:
        return self.num_layers * self._attention_params + self._mlp_params(num_experts) + self.hidden_size

    @property
    def _attention_params(self) -> int:
        norms = 2 * self.hidden_size
        if (latent := self.latent) is None:
            return norms + self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        query_dim = self.heads * (latent.nope_dim + latent.rope_dim)
        query = self.hidden_size * latent.q_rank + latent.q_rank * query_dim if latent.q_rank else self.hidden_size * query_dim
        keys_values = self.hidden_size * (latent.kv_rank + latent.rope_dim)
        expanded = latent.kv_rank * self.heads * (latent.nope_dim + latent.value_dim)
        return norms + query + keys_values + expanded + self.heads * latent.value_dim * self.hidden_size

    def _mlp_params(self, num_experts: float) -> int:
        matrices = 3 if self.is_gated else 2
        if not self.num_experts:
            return self.num_layers * matrices * self.hidden_size * self.mlp_size
        routed = matrices * self.hidden_size * (num_experts * self.expert_size + self.shared_size) + self.hidden_size * self.num_experts
        return round(
            (self.num_layers - self.num_dense_layers) * routed + self.num_dense_layers * matrices * self.hidden_size * self.mlp_size
        )

    # -- KV cache and arithmetic -------------------------------------------------------------------------------------------------

    @property
    def num_kv_values(self) -> int:
        if self.is_encoder:
            return 0
        if self.latent is not None:
            return self.num_layers * (self.latent.kv_rank + self.latent.rope_dim)
        return self.num_layers * 2 * self.kv_heads * self.head_dim

    def num_resident_kv_values(self, num_tokens: float) -> float:
        if not self.window:
            return self.num_kv_values * num_tokens
        per_layer = self.num_kv_values / self.num_layers
        whole = self.num_layers - self.num_window_layers
        return per_layer * (whole * num_tokens + self.num_window_layers * min(num_tokens, self.window))

    def attention_flops(self, num_tokens: float) -> float:
        """FLOPs of the scores and weighted sum of one query, over all layers."""
        dims = 2 * self.head_dim if self.latent is None else self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim
        per_layer = 2 * self.heads * dims
        whole = self.num_layers - self.num_window_layers
        seen = whole * num_tokens + self.num_window_layers * min(num_tokens, self.window)
        return per_layer * seen

    @property
    def divided_sizes(self) -> tuple[int, ...]:
        """Inner widths of the feed-forward blocks that there are, each of which tensor parallelism divides."""
        has_dense = not self.num_experts or self.num_dense_layers > 0
        return (*((self.mlp_size,) if has_dense else ()), *(size for size in (self.expert_size, self.shared_size) if size))

    def kv_shards(self, tp: int) -> int:
        return 1 if self.latent is not None else min(tp, self.kv_heads)
