"""Reads from config.json the matrix products of a dense Llama-like model, and the size of a token's keys and values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Products:
    """(out, in) of every matrix product, the keys and values of a token, and how often a layer comes."""

    layer: tuple[Shape, ...]
    layers: int
    head: Shape
    kv_numbers: int

    @property
    def weights(self) -> int:
        """Numbers that one step reads."""
        return self.layers * sum(out * inputs for out, inputs in self.layer) + self.head[0] * self.head[1]


def products_of(model: Path) -> Products:
    config = json.loads((model / "config.json").read_bytes())
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    attention, keys = heads * size, config["num_key_value_heads"] * size
    layer = ((attention + 2 * keys, hidden), (hidden, attention), (2 * ffn, hidden), (hidden, ffn))
    layers = config["num_hidden_layers"]
    return Products(layer, layers, (config["vocab_size"], hidden), kv_numbers=2 * keys * layers)
