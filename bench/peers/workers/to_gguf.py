"""Converts a checkpoint of `bench.peers.models` to bfloat16 GGUF, for speed only: rows of q and k are not permuted, so the text differs.

PYTHON_WITH_GGUF to_gguf.py MODEL OUT.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np
import torch
from safetensors.torch import load_file

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{PARTS['.'.join(part)]}.{kind}"


def write_facts(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def write_tokenizer(writer: Any, tokenizer: dict[str, Any], vocab_size: int) -> None:
    spellings = [f"<unused {number}>" for number in range(vocab_size)]
    for text, number in tokenizer["model"]["vocab"].items():
        spellings[number] = text
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    for number, text in special.items():
        spellings[number] = text
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(spellings)
    writer.add_token_types([3 if number in special else 1 for number in range(vocab_size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def main(model: Path, out: Path) -> None:
    config = json.loads((model / "config.json").read_bytes())
    writer = gguf.GGUFWriter(str(out), ARCHITECTURES[config["architectures"][0]])
    write_facts(writer, config)
    write_tokenizer(writer, json.loads((model / "tokenizer.json").read_bytes()), config["vocab_size"])
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if tensor.ndim == 1:
                writer.add_tensor(gguf_name(name), tensor.float().numpy())
                continue
            bits = tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint8).reshape(tensor.shape[0], -1)
            writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
