"""Translates GGUF architectures to Hugging Face: the names of tensors, and the metadata keys that become config.json.

A key `ARCH.name` is written here without its prefix. Fields without a GGUF key get the constants of llama.cpp.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.gguf.shards import GgufModel

MAX_SIZE = 2**26
"""The largest integer; `tensor.models.fields` bounds each field of config.json."""
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
NOT_COMPUTED = (
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attn_logit_softcapping", "embedding_scale",
    "expert_shared_count", "expert_weights_scale", "final_logit_softcapping", "logit_scale", "pooling_type", "residual_scale",
    "use_parallel_residual",
)  # fmt: skip
"""Zero and false pass."""
NOT_MANY = ("expert_gating_func", "expert_group_count", "interleave_moe_layer_step")
"""Keys of which one, and zero, mean what every architecture here computes: one group of experts, chosen by softmax, in every layer."""
YARN_KEYS = {"attn_factor": "attn_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned", *YARN_KEYS)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_PLAIN = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_LLAMA = {**_ATTENTION, "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_MIXTRAL = {**_ATTENTION, "block_sparse_moe.gate": "ffn_gate_inp"}
_MIXTRAL_EXPERTS = {
    "block_sparse_moe.experts.w1": "ffn_gate",
    "block_sparse_moe.experts.w2": "ffn_down",
    "block_sparse_moe.experts.w3": "ffn_up",
}
_QWEN3_MOE = {**_ATTENTION, **_HEAD_NORMS, "mlp.gate": "ffn_gate_inp"}
_QWEN3_MOE_EXPERTS = {"mlp.experts.gate_proj": "ffn_gate", "mlp.experts.up_proj": "ffn_up", "mlp.experts.down_proj": "ffn_down"}
_GEMMA3 = {
    **_LLAMA,
    **_HEAD_NORMS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PHI3 = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class TensorPlace(NamedTuple):
    """name    in the GGUF file
    expert  index in the leading dimension; None: the tensor is not stacked
    heads   of a weight whose rows are stored pair by pair in each head; None: they are in order
    """

    name: str
    expert: int | None = None
    heads: int | None = None


@dataclass(frozen=True, slots=True)
class NameTable:
    """layer        name in a layer -> GGUF's, both without ".weight"
    experts      the same of an expert's linears, without the expert's number
    rotated      heads of q and k where the file stores each head's rows as pairs (arch "llama"); empty: they are in order
    is_norm_plus norm weights are stored as w + 1
    """

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    rotated: Mapping[str, int] = field(default_factory=dict)
    is_norm_plus: bool = False

    def find(self, name: str) -> tuple[TensorPlace, ...]:
        """Where the tensor may be, the usual place first; none for a name that the architecture does not have."""
        if name in _PLAIN:
            return (TensorPlace(_PLAIN[name]),)
        if (found := _LAYER.fullmatch(name)) is None:
            return ()
        number, inner, kind = found.groups()
        if (expert := _EXPERT.fullmatch(inner)) is not None:
            stored = self.experts.get(f"{expert[1]}.{expert[3]}")
            index = int(expert[2])
            own = TensorPlace(f"blk.{number}.{stored}.{index}.{kind}")  # of files that were made before experts were stacked
            return () if stored is None else (TensorPlace(f"blk.{number}.{stored}_exps.{kind}", expert=index), own)
        stored = self.layer.get(inner)
        return () if stored is None else (TensorPlace(f"blk.{number}.{stored}.{kind}", heads=self.rotated.get(stored)),)

    def adds_one(self, name: str) -> bool:
        return self.is_norm_plus and name.endswith("norm.weight")


class _Keys(NamedTuple):
    file: ConfigFile
    arch: str

    def named(self, name: str) -> str:
        return f"{self.arch}.{name}"

    def has(self, name: str) -> bool:
        return self.file.has(self.named(name))

    def integer(self, name: str, default: int | None = None, *, low: int = 0) -> int:
        values = self.file.values.get(self.named(name))
        if isinstance(values, list):
            if not values or any(value != values[0] for value in values):
                self.file.refuse(self.named(name), "differs from layer to layer, which no architecture here does")
            return ConfigFile(self.file.file, {self.named(name): values[0]}).integer(self.named(name), low, MAX_SIZE)
        return self.file.integer(self.named(name), low, MAX_SIZE, default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.file.number(self.named(name), 0.0, 1e12, default)


def _llama(keys: _Keys, model: GgufModel) -> tuple[dict[str, object], NameTable]:
    """Llama, Mistral and Mixtral, whose q and k are stored in pairs."""
    rotated = {"attn_q": keys.integer("attention.head_count", low=1)}
    rotated["attn_k"] = keys.integer("attention.head_count_kv", rotated["attn_q"])
    window = {"sliding_window": keys.integer("attention.sliding_window")} if keys.has("attention.sliding_window") else {}
    if keys.integer("expert_count", 0):
        experts = {"num_local_experts": keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count")}
        named = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
        return {**named, **experts, **window}, NameTable(_MIXTRAL, _MIXTRAL_EXPERTS, rotated)
    table = NameTable(_LLAMA, rotated=rotated)
    if window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **window}, table
    biases = {"attention_bias": "blk.0.attn_q.bias" in model.tensors, "mlp_bias": "blk.0.ffn_up.bias" in model.tensors}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **biases}, table


def _qwen2(_keys: _Keys, _model: GgufModel) -> tuple[dict[str, object], NameTable]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, NameTable(_LLAMA)


def _qwen3(_keys: _Keys, _model: GgufModel) -> tuple[dict[str, object], NameTable]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, NameTable({**_LLAMA, **_HEAD_NORMS})


def _qwen3_moe(keys: _Keys, _model: GgufModel) -> tuple[dict[str, object], NameTable]:
    """Every layer has experts, and their weights in a token's sum add up to 1: llama.cpp computes nothing else."""
    used = keys.integer("expert_used_count", low=1)
    fields: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": keys.integer("expert_count", low=1),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", 0) or keys.integer("feed_forward_length") // used,
        "norm_topk_prob": True,
    }
    return fields, NameTable(_QWEN3_MOE, _QWEN3_MOE_EXPERTS)


def _gemma3(keys: _Keys, _model: GgufModel) -> tuple[dict[str, object], NameTable]:
    """The pattern of windows, the local base and the 27B's scale are constants of llama.cpp's; newer files say the first two."""
    layers, heads = keys.integer("block_count"), keys.integer("attention.head_count", low=1)
    fields: dict[str, object] = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "query_pre_attn_scalar": keys.integer("embedding_length") // heads if layers == 62 else keys.integer("attention.key_length"),
    }
    return fields, NameTable(_GEMMA3, is_norm_plus=True)


def _phi3(keys: _Keys, model: GgufModel) -> tuple[dict[str, object], NameTable]:
    window = keys.integer("attention.sliding_window", 0)
    fields: dict[str, object] = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": window or None}
    long, short = (_factors(model, f"rope_factors_{which}.weight") for which in ("long", "short"))
    if long and short:
        original = keys.integer("rope.scaling.original_context_length")
        scaling: dict[str, object] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor", 1.0)
        fields |= {"rope_scaling": scaling, "original_max_position_embeddings": original}
    return fields, NameTable(_PHI3)


_Describe = Callable[[_Keys, GgufModel], tuple[dict[str, object], NameTable]]
ARCHITECTURES: dict[str, _Describe] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
    "phi3": _phi3,
}


def name_table(model: GgufModel) -> NameTable:
    return _described(model)[1]


def make_config(model: GgufModel) -> dict[str, object]:
    keys, (own, _) = _keys(model), _described(model)
    _refuse_not_computed(keys)
    heads, hidden_size = keys.integer("attention.head_count", low=1), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", max(1, hidden_size // heads), low=1)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        keys.file.refuse(keys.named("attention.value_length"), f"differs from the key's length, {head_dim}")
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(model.keys.file, "tensor token_embd.weight is missing")
    return {
        "vocab_size": embedding[1].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "torch_dtype": _dtype(model),
        **_rope(keys, model, head_dim),
        **own,
        "quantization_config": {"quant_method": "gguf", "stored": model.title()},
    }


def _keys(model: GgufModel) -> _Keys:
    return _Keys(model.keys, model.keys.text("general.architecture"))


def _described(model: GgufModel) -> tuple[dict[str, object], NameTable]:
    keys = _keys(model)
    if keys.arch not in ARCHITECTURES:
        supported = f"Supported: {', '.join(ARCHITECTURES)} (Mistral and Mixtral are called llama)."
        keys.file.refuse("general.architecture", "is not supported", supported)
    return ARCHITECTURES[keys.arch](keys, model)


def _refuse_not_computed(keys: _Keys) -> None:
    for name in map(keys.named, NOT_COMPUTED):
        if keys.file.values.get(name):
            keys.file.refuse(name, "is not supported")
    for name in map(keys.named, NOT_MANY):
        if keys.file.values.get(name, 0) not in (0, 1):
            keys.file.refuse(name, "is not supported")
    if keys.integer("expert_count", 0) and not keys.file.flag(keys.named("expert_weights_norm"), True):
        keys.file.refuse(keys.named("expert_weights_norm"), "the weights of a token's experts always sum to one")
    if not keys.file.flag(keys.named("attention.causal"), True):
        keys.file.refuse(keys.named("attention.causal"), "models that see later tokens, for embeddings, are not supported")
    prefix = keys.named("rope.scaling.")
    for name in keys.file.values:
        if name.startswith(prefix) and name.removeprefix(prefix) not in SCALING_KEYS:
            keys.file.refuse(name, "is not supported")


def _dtype(model: GgufModel) -> str:
    """Blocks are of no dtype: the bfloat16 in which nearly every model was trained."""
    return {"F32": "float32", "F16": "float16"}.get(model.most_frequent(), "bfloat16")


def _rope(keys: _Keys, model: GgufModel, head_dim: int) -> dict[str, object]:
    """Factors per pair (`rope_freqs.weight`, Llama 3.1's) are LongRoPE's of one length."""
    fields: dict[str, object] = {}
    if (rotated := keys.integer("rope.dimension_count", head_dim)) != head_dim:
        fields["partial_rotary_factor"] = rotated / head_dim
    if factors := _factors(model, "rope_freqs.weight"):
        fields["rope_scaling"] = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    factor = next((keys.number(name) for name in ("rope.scaling.factor", "rope.scale_linear") if keys.has(name)), 1.0)
    kind = keys.file.text(keys.named("rope.scaling.type"), "linear")  # as llama.cpp takes a file that has a factor alone
    if kind in ("none", "longrope") or (kind == "linear" and factor == 1.0):
        return fields
    if kind not in ("linear", "yarn") or factors:
        keys.file.refuse(keys.named("rope.scaling.type"), "only linear and yarn are supported, and neither with rope_freqs.weight")
    scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
    if keys.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    if kind == "yarn":
        scaling |= {field: keys.number(f"rope.scaling.{name}") for name, field in YARN_KEYS.items() if keys.has(f"rope.scaling.{name}")}
    return {**fields, "rope_scaling": scaling}


def _factors(model: GgufModel, name: str) -> list[float]:
    if name not in model.tensors:
        return []
    header, tensor = model.tensors[name]
    if tensor.kind.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise CheckpointError(str(header.path), f"tensor {name} is {tensor.kind.name} of {list(tensor.shape)}, not a short row of F32")
    with header.path.open("rb") as stream:
        stream.seek(tensor.begin)
        data = stream.read(tensor.end - tensor.begin)
    if len(data) != tensor.end - tensor.begin:
        raise CheckpointError(str(header.path), f"tensor {name} ends early: the file shrank while it was read")
    return list(struct.unpack(f"<{tensor.shape[0]}f", data))
