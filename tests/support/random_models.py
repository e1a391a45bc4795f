"""Draws configurations of every family that is served: rotary scaling, windows, ties, biases, heads, experts, and quantized linears.

`draw` gives the fields of transformers' own configuration class; `quantize_folder` stores a saved model's linears in a format.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from float_formats_kit import Compressed, Fp8, ModelOpt
from quantized_kit import Awq, Gptq, Stored
from safetensors.torch import load_file, save_file

VOCAB, TRAINED, CONTEXT = 97, 32, 128
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Gemma3", "Phi3")
ROPES = ("default", "linear", "llama3", "yarn", "longrope")
FORMATS: tuple[Stored, ...] = (
    Gptq(4, 32), Gptq(2, 32, version=2), Gptq(8, -1), Gptq(4, 32, symmetric=True), Gptq(4, 32, desc_act=True), Awq(32), Awq(-1), Fp8(),
    Fp8((16, 32), "weight_scale_inv"), ModelOpt("FP8"), ModelOpt("NVFP4"), Compressed("pack-quantized", 4, (1, 32), symmetric=False),
    Compressed("int-quantized", 8, (1, 0)), Compressed("float-quantized", 8, (1, 0)), Compressed("nvfp4-pack-quantized", 4, (1, 16)),
    Compressed("mxfp4-pack-quantized", 4, (1, 32)), Compressed("mxfp8-quantized", 8, (1, 32)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draw:
    """rope: one of ROPES; stored: None: the linears are plain; is_older: config.json is spelled as model cards do

    max_model_len  None: the default, for sequences that may be as long as LongRoPE's first training
    """

    family: str
    rope: str
    fields: dict[str, Any]
    stored: Stored | None
    is_older: bool
    max_model_len: int | None
    tokens: list[int]
    chunk: int

    def __str__(self) -> str:
        return f"{self.family}, {self.stored or 'plain'}, older spelling: {self.is_older}, {self.fields}"


def draw(seed: int) -> Draw:
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    stored = rng.choice(FORMATS) if rng.random() < 0.4 else None
    head_dim = rng.choice([16, 32] if stored else [8, 12, 16, 20, 32])
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    if stored is not None:
        heads, kv_heads = rng.choice([(2, 1), (2, 2), (4, 1), (4, 2)])
    has_head_dim = family not in ("Phi3", "Qwen2")
    hidden = heads * (rng.choice([8, 16, 20]) if has_head_dim and stored is None else head_dim)
    hidden = 64 if stored is not None and has_head_dim else hidden
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": rng.choice([32, 64, 96] if stored else [24, 40, 56]),
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if has_head_dim:
        fields["head_dim"] = head_dim
    kind, params = _rope(rng, family, head_dim)
    # Linear scaling and YaRN may be added to a file that still has the positions of the first training.
    is_counted = params.get("factor", 1.0) < 2 or kind not in ("linear", "yarn") or family == "Gemma3" or rng.random() < 0.5
    fields |= {"max_position_embeddings": CONTEXT if is_counted else TRAINED, "rope_parameters": params}
    fields |= _family_fields(rng, family, params)
    is_short = kind == "longrope" and rng.random() < 0.5
    return Draw(
        family,
        kind,
        fields,
        stored,
        is_older=rng.random() < 0.4,
        max_model_len=CONTEXT if kind == "longrope" and not is_short else None,
        tokens=rng.choices(range(VOCAB), k=rng.randrange(8, TRAINED) if is_short else rng.randrange(TRAINED + 2, 60)),
        chunk=rng.choice([5, 16, 64]),
    )


def _rope(rng: random.Random, family: str, head_dim: int) -> tuple[str, dict[str, Any]]:
    kind = rng.choice(ROPES if family != "Phi3" else ("default", "longrope"))
    params: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([100.0, 1e4, 5e5])}
    rotated = head_dim
    if family == "Phi3" and (factor := rng.choice([1.0, 0.75, 0.5])) != 1.0 and head_dim * factor % 2 == 0:
        params["partial_rotary_factor"], rotated = factor, int(head_dim * factor)
    if kind in ("linear", "llama3"):
        params["factor"] = rng.choice([1.0, 2.5, 4.0])
    if kind == "llama3":
        params |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0]), "original_max_position_embeddings": TRAINED}
    if kind == "yarn":
        params |= {"factor": CONTEXT / TRAINED, "original_max_position_embeddings": TRAINED}
        more: list[dict[str, Any]] = [
            {}, {"attention_factor": 1.3},
            {"beta_fast": 3.0, "beta_slow": 2.0}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"truncate": False},
        ]  # fmt: skip
        drawn = rng.choice(more)
        # transformers 5.23 looks for `truncate` beside the layers' types of Gemma 3, where no file has it; here it counts as written.
        params |= {} if family == "Gemma3" and "truncate" in drawn else drawn
    if kind == "longrope":
        factors = {
            f"{name}_factor": [round(rng.uniform(1, most), 2) for _ in range(rotated // 2)] for name, most in (("short", 2), ("long", 9))
        }
        params |= factors | rng.choice([{}, {"attention_factor": 1.3}])
        if family != "Phi3":
            params |= {"original_max_position_embeddings": TRAINED} | rng.choice([{}, {"factor": 3.0}])
    return kind, params


def _family_fields(rng: random.Random, family: str, params: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3's local layers rotate without scaling."""
    window, types = rng.choice([1, 5, 9, 33]), rng.choices(["sliding_attention", "full_attention"], k=2)
    experts = {"num_experts_per_tok": rng.choice([1, 2, 3])}
    match family:
        case "Llama":
            return {"attention_bias": rng.random() < 0.3, "mlp_bias": rng.random() < 0.3}
        case "Mistral":
            return {"sliding_window": rng.choice([None, window])}
        case "Mixtral":
            return {"sliding_window": rng.choice([None, window]), "num_local_experts": rng.choice([3, 4]), **experts}
        case "Qwen2" | "Qwen3":
            own: dict[str, Any] = {"attention_bias": rng.random() < 0.3} if family == "Qwen3" else {}
            layers: dict[str, Any] = rng.choice([{"layer_types": types}, {"max_window_layers": rng.choice([0, 1, 2])}])
            wide: list[dict[str, Any]] = [{}, {"use_sliding_window": True, "sliding_window": window, **layers}]
            return own | rng.choice(wide)
        case "Qwen3Moe":
            own = {"num_experts": rng.choice([3, 5]), "moe_intermediate_size": 32, "norm_topk_prob": rng.random() < 0.5, **experts}
            some: list[dict[str, Any]] = [{}, {"mlp_only_layers": [rng.choice([0, 1])]}, {"decoder_sparse_step": 2}]
            return own | rng.choice(some)
        case "Gemma3":
            local = {"rope_type": "default", "rope_theta": rng.choice([100.0, 1e4])}
            return {
                "sliding_window": window, "layer_types": types, "query_pre_attn_scalar": rng.choice([16, 20]),
                "attention_bias": rng.random() < 0.3, "rope_parameters": {"full_attention": params, "sliding_attention": local},
            }  # fmt: skip
    return {"sliding_window": rng.choice([None, window]), "original_max_position_embeddings": TRAINED}


def spell_as_model_cards_do(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    params = config.pop("rope_parameters")
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = params["sliding_attention"]["rope_theta"]
        params = params["full_attention"]
    config["rope_theta"] = params.pop("rope_theta")
    if params.get("rope_type") != "default":
        config["rope_scaling"] = {"type": params.pop("rope_type"), **params}
    elif "partial_rotary_factor" in params:
        config["partial_rotary_factor"] = params["partial_rotary_factor"]
    (folder / "config.json").write_text(json.dumps(config))


def quantize_folder(folder: Path, stored: Stored) -> dict[str, torch.Tensor]:
    """Store the linears of the folder's layers in a format; the dequantized weights by name."""
    generator = torch.Generator().manual_seed(0)
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    parts: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, weight in load_file(file).items():
        stem = name.removesuffix(".weight")
        if weight.dim() != 2 or ".layers." not in name or stem.endswith(".gate"):
            parts[name] = weight
            continue
        made, dense[name] = stored.store((weight.shape[0], weight.shape[1]), generator)
        parts |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in made.items()}
    save_file(parts, file)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(stored.section)}))
    return dense
