"""Reads the sizes of a model (`ModelShape`) from the fields of config.json that families share."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from headrace.bundled import bundled_names
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import UnknownKey
from headrace.policy.placement.model import WEIGHT_BYTES, LatentAttention, ModelShape
from headrace.tensor.checkpoint.config import ConfigFile

ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "nomic_bert", "modernbert"})
UNGATED = (ENCODERS - {"modernbert", "nomic_bert"}) | {"opt", "gpt_neox", "phi", "starcoder2", "gpt_bigcode", "nemotron"}
"""Families whose feed-forward blocks have two matrices instead of three."""

EVERY_OTHER = frozenset({"gemma2"})
"""Families with the sliding window in every other layer although config.json does not say so."""

TIED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
"""Families whose head is the embedding table if config.json does not say."""

FAMILIES = (
    ENCODERS
    | UNGATED
    | TIED
    | {"llama", "mistral", "ministral", "mixtral", "phi3", "phimoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmo", "olmo2", "olmo3"}
    | {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "olmoe", "granite", "granitemoe", "cohere", "cohere2", "glm", "glm4", "glm4_moe"}
    | {"smollm3", "stablelm", "seed_oss", "exaone4"}
)
"""Any other model_type is read as Llama, with a note in the plan."""

OTHER_LAYERS = (
    "state_size",
    "ssm_",
    "mamba_",
    "linear_",
    "full_attention_interval",
    "attn_layer_period",
    "attn_type_list",
    "conv_L_cache",
    "hybrid_override_pattern",
    "layers_block_type",
    "block_types",
    "cross_attention_layers",
    "num_decoder_layers",
    "decoder_layers",
    "encoder_layers",
    "is_encoder_decoder",
    "add_cross_attention",
)
"""Prefixes of fields that show layers with another state than keys and values."""

LAYER_TYPES = ("full_attention", "sliding_attention")

NOT_READ = {"interleave_moe_layer_step": 1, "decoder_sparse_step": 1, "moe_layer_freq": 1, "mlp_only_layers": []}
"""Field that says which layers have experts -> the value that means all."""

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", **{name: name for name in WEIGHT_BYTES}}

MAX_WIDTH = 2**20
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_POSITIONS = 2**26

FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "sliding_window",
    "use_sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    *NOT_READ,
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def check_entry(where: str, name: str, entry: Mapping[str, object]) -> None:
    """Raises UnknownKey or CheckpointError."""
    for field in entry:
        if field not in FIELDS:
            raise UnknownKey(f"{where}.{field}", FIELDS, {})
    _read_entry(where, name, entry)


def find_entry(name: str, catalogue: Mapping[str, Mapping[str, object]]) -> tuple[ModelShape, str]:
    """(shape, the weights' dtype). Raises ConfigError."""
    if (key := name if name in catalogue else name.lower()) in catalogue:
        return _read_entry(f"catalogue, {key}", key, catalogue[key])
    known = sorted({*catalogue, *bundled_names()})
    near = get_close_matches(name.lower(), known, n=1) or [each for each in known if name.lower() in each]
    remedy = f"Did you mean {near[0]}? " if near else ""
    reason = f"{name!r} is no folder with a config.json, no .gguf file, no bundled model and no entry of the catalogue"
    raise ConfigError("MODEL", reason, f"{remedy}Known: {', '.join(known)}.")


def _read_entry(where: str, name: str, entry: Mapping[str, object]) -> tuple[ModelShape, str]:
    config = ConfigFile(where, entry)
    return read_shape(config, name), read_dtype(config)


def refuse_other_layers(config: ConfigFile) -> None:
    for field in (field for field, value in config.values.items() if field.startswith(OTHER_LAYERS) and value):
        config.refuse(field, "only layers of attention to one sequence's keys and values are planned for")


def read_shape(config: ConfigFile, name: str) -> ModelShape:
    """Raises CheckpointError."""
    refuse_other_layers(config)
    kind = config.text("model_type", "llama")
    layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    hidden, heads = config.integer("hidden_size", 1, MAX_WIDTH), config.integer("num_attention_heads", 1, 4096)
    kv_heads = config.integer("num_key_value_heads", 1, heads, default=heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    if not config.has("head_dim") and hidden % heads:
        config.refuse("num_attention_heads", f"must divide hidden_size ({hidden}) when head_dim is not given")
    window, num_window_layers = _window(config, kind, layers)
    num_experts = next((config.integer(key, 1, MAX_EXPERTS) for key in _EXPERTS if config.has(key)), 0)
    expert_size = config.integer("moe_intermediate_size", 1, MAX_WIDTH, default=config.integer("intermediate_size", 1, MAX_WIDTH))
    for field, every in NOT_READ.items():
        if num_experts and config.has(field) and config.values[field] != every:
            config.refuse(field, "experts in some layers alone are not planned for")
    shared = config.integer("n_shared_experts", 0, 64, default=0) * expert_size
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.integer("head_dim", 1, 1024, default=max(1, hidden // heads)),
        vocab_size=config.integer("vocab_size", 1, 2**24),
        max_positions=config.integer("max_position_embeddings", 1, MAX_POSITIONS),
        mlp_size=config.integer("intermediate_size", 1, MAX_WIDTH),
        is_gated=kind not in UNGATED,
        is_tied=config.flag("tie_word_embeddings", kind in TIED),
        num_experts=num_experts,
        experts_per_token=config.integer("num_experts_per_tok", 1, num_experts, default=min(2, num_experts)) if num_experts else 0,
        expert_size=expert_size if num_experts else 0,
        shared_size=config.integer("shared_expert_intermediate_size", 0, MAX_WIDTH, default=shared) if num_experts else 0,
        num_dense_layers=config.integer("first_k_dense_replace", 0, layers, default=0) if num_experts else 0,
        window=window,
        num_window_layers=num_window_layers,
        latent=_latent(config),
        is_encoder=kind in ENCODERS,
        is_assumed=kind not in FAMILIES,
    )


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _window(config: ConfigFile, kind: str, layers: int) -> tuple[int, int]:
    """(window in tokens, layers that have it); (0, 0) without one."""
    types = config.items("layer_types")
    if types and (len(types) != layers or any(each not in LAYER_TYPES for each in types)):
        config.refuse("layer_types", f"must name {' or '.join(LAYER_TYPES)} for each of {layers} layers")
    if not config.has("sliding_window") or not config.flag("use_sliding_window", True):
        if "sliding_attention" in types:
            config.refuse("layer_types", "names sliding_attention, but there is no sliding_window")
        return 0, 0
    window = config.integer("sliding_window", 1, MAX_POSITIONS)
    if types:
        return window, types.count("sliding_attention")
    if config.has("sliding_window_pattern"):
        every = config.integer("sliding_window_pattern", 1, layers)
        return window, layers - layers // every
    return window, layers - layers // 2 if kind in EVERY_OTHER else layers


def _latent(config: ConfigFile) -> LatentAttention | None:
    if not config.has("kv_lora_rank"):
        return None
    return LatentAttention(
        q_rank=config.integer("q_lora_rank", 0, MAX_WIDTH, default=0),
        kv_rank=config.integer("kv_lora_rank", 1, MAX_WIDTH),
        nope_dim=config.integer("qk_nope_head_dim", 1, 4096),
        rope_dim=config.integer("qk_rope_head_dim", 1, 4096),
        value_dim=config.integer("v_head_dim", 1, 4096),
    )


def read_dtype(*holders: ConfigFile) -> str:
    """bf16 if none of these names one. Raises CheckpointError."""
    for holder in holders:
        for field in ("dtype", "torch_dtype"):
            if holder.has(field) and (name := holder.text(field).removeprefix("torch.")) != "auto":
                if name not in DTYPES:
                    holder.refuse(field, f"only {', '.join(DTYPES)} are known")
                return DTYPES[name]
    return "bf16"
