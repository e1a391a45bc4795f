"""Writes small GGUF files from the published layout, and GGUF files of model folders. No code of ours that reads them is used.

`quantize` rounds in the plainest way: the files must be read right, not be good.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

ALIGNMENT = 32
KIND_NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "BF16": 30,
}  # fmt: skip
Floats = np.ndarray[Any, np.dtype[np.float32]]
Entry = tuple[str, tuple[int, ...], bytes]
"""(type, shape with the outermost dimension first, the bytes)."""
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
}
_EXPERT_NAMES = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_bytes(keys: Mapping[str, object], tensors: Mapping[str, Entry], *, version: int = 3) -> bytes:
    """A whole file. Values of keys: bool, int (uint32), float (float32), str, lists of one of these, or `Raw`."""
    head, data, num_bytes = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(keys))], list[bytes](), 0
    for name, value in keys.items():
        head += [_text(name), _value(value)]
    for name, (kind, shape, content) in tensors.items():
        data += [b"\0" * (-num_bytes % ALIGNMENT), content]
        num_bytes += len(data[-2])
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += [_text(name), struct.pack("<I", len(shape)), dims, struct.pack("<IQ", KIND_NUMBERS[kind], num_bytes)]
        num_bytes += len(content)
    header = b"".join(head)
    return b"".join([header, b"\0" * (-len(header) % ALIGNMENT), *data])


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: object) -> bytes:
    number, content = _typed(value)
    return struct.pack("<I", number) + content


def _typed(value: object) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _text(value)
        case list():
            items = [_typed(item) for item in value]
            return 9, struct.pack("<IQ", items[0][0] if items else 4, len(items)) + b"".join(content for _, content in items)
    raise TypeError(value)


def entry(tensor: Tensor, kind: str) -> Entry:
    """The tensor in a type; one whose rows do not split into blocks, and every vector, as F32."""
    shape = tuple(tensor.shape)
    if len(shape) == 1 or (kind.startswith("Q") and shape[-1] % 32):
        kind = "F32"
    return kind, shape, quantize(tensor, kind)


def quantize(tensor: Tensor, kind: str) -> bytes:
    values = tensor.detach().float().numpy()
    if kind == "F32":
        return bytes(values.astype("<f4").tobytes())
    if kind == "F16":
        return bytes(values.astype("<f2").tobytes())
    if kind == "BF16":
        return bytes(tensor.bfloat16().contiguous().view(torch.int16).numpy().tobytes())
    scales, integers = _rounded(values, kind)
    if kind == "Q8_0":
        return np.concatenate((scales.view(np.uint8), integers.view(np.uint8)), axis=1).tobytes()
    halves = (integers + 8).astype(np.uint8)
    return np.concatenate((scales.view(np.uint8), halves[:, :16] | (halves[:, 16:] << 4)), axis=1).tobytes()


def _rounded(values: Floats, kind: str) -> tuple[Any, Any]:
    """(scales float16 [blocks, 1], integers int8 [blocks, 32]) of a type with a scale per 32 values."""
    blocks, most = values.reshape(-1, 32), {"Q8_0": 127, "Q4_0": 7}[kind]
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / most).astype(np.float16)
    integers = np.round(blocks / np.where(scales == 0, 1, scales).astype(np.float32)).clip(-most, most)
    return scales, integers.astype(np.int8)


def dense(tensor: Tensor, kind: str) -> Tensor:
    """The values that a file of `entry(tensor, kind)` stands for, float32, computed from what was rounded."""
    kind, shape, _ = entry(tensor, kind)
    if not kind.startswith("Q"):
        return {"F32": tensor.float, "F16": tensor.half, "BF16": tensor.bfloat16}[kind]().float()
    scales, integers = _rounded(tensor.detach().float().numpy(), kind)
    return torch.from_numpy(integers * scales.astype(np.float32)).reshape(shape)


def paired(tensor: Tensor, heads: int) -> Tensor:
    """Rows of q or k as files of arch llama have them: element i of a head's first half stands before element i of its second half."""
    return torch.cat([torch.stack((head[: len(head) // 2], head[len(head) // 2 :]), dim=1).flatten(0, 1) for head in tensor.chunk(heads)])


def stored_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], arch: str) -> dict[str, Tensor]:
    """Weights of a Hugging Face folder by GGUF's names and in GGUF's order."""
    names = {**_LAYER_NAMES, **(_GEMMA3_NAMES if arch == "gemma3" else {})}
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in _TOP_NAMES:
            stored = f"{_TOP_NAMES[stem]}.{kind}"
        else:
            _, _, number, inner = stem.split(".", 3)
            if ".experts." in inner:
                _, _, index, linear = inner.split(".")
                place = _EXPERT_NAMES.get(linear) or names[f"mlp.{linear}"]
                experts.setdefault(f"blk.{number}.{place}_exps.{kind}", {})[int(index)] = tensor
                continue
            stored = f"blk.{number}.{names[inner]}.{kind}"
        if arch == "llama" and ".attn_q." in stored:
            tensor = paired(tensor, config["num_attention_heads"])
        if arch == "llama" and ".attn_k." in stored:
            tensor = paired(tensor, config["num_key_value_heads"])
        found[stored] = tensor.float() + 1 if arch == "gemma3" and stored.endswith("norm.weight") else tensor
    return {**found, **{name: torch.stack([parts[index] for index in sorted(parts)]) for name, parts in experts.items()}}


def model_keys(config: Mapping[str, Any], arch: str) -> dict[str, object]:
    names = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
        "sliding_window": "attention.sliding_window",
        "num_local_experts": "expert_count",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    fields = {f"{arch}.{key}": config[name] for name, key in names.items() if config.get(name) is not None}
    return {"general.architecture": arch, **fields}


def byte_level_keys(folder: Path, pre: str) -> dict[str, object]:
    document = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["content"]: token for token in document["added_tokens"]}
    ids = {**document["model"]["vocab"], **{text: token["id"] for text, token in added.items()}}
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [1 if token not in added else 3 if added[token]["special"] else 4 for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.ggml.{key}_token_id": ids[config[name]] for name, key in named.items() if config.get(name)},
        **({"tokenizer.chat_template": config["chat_template"]} if "chat_template" in config else {}),
    }


def bundled_gguf(folder: Path, path: Path, kind: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    tensors = stored_tensors(config, load_file(folder / "model.safetensors"), "llama")
    keys = {**model_keys(config, "llama"), **byte_level_keys(folder, "headrace")}
    path.write_bytes(gguf_bytes(keys, {name: entry(tensor, kind) for name, tensor in tensors.items()}))
    return path
