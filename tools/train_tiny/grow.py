"""Makes a larger model, or one for another tokenizer, out of an exported one.

    python -m tools.train_tiny.grow --exported src/headrace/bundled/headrace-tiny --training tools/train_tiny/results/headrace-tiny.json \\
        --new-tokenizer --to /tmp/grown

Growth keeps the function: logits are those of the small model until the first training step, but for the norms'
epsilon. New layers start with zero output projections, new feed-forward units and new query heads with zero output
columns, new dimensions of the residual stream with zeros in everything that writes them; the norms' weights are
rescaled, since the mean square is taken over more dimensions. What only reads (new query rows, new gates, new columns)
starts at random, so that gradients flow.

Another tokenizer changes the function: a token that both have keeps its embedding, any other gets the mean of the
embeddings of the pieces that the old tokenizer makes of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from torch import Tensor

from tools.train_tiny.model import TinyConfig, TinyLlama, config_from_hf, num_parameters, state_from_hf
from tools.train_tiny.train import CONFIGS, new_tokenizer

State = dict[str, Tensor]
BLOCK = ("qkv.weight", "o.weight", "gate_up.weight", "down.weight", "attn_norm", "mlp_norm")


@torch.no_grad()
def grow(state: State, small: TinyConfig, large: TinyConfig, *, seed: int = 0) -> State:
    """The weights of `large` that compute what `state` computes in `small`. The vocabulary and the number of KV heads stay."""
    kept = ("vocab_size", "head_dim", "num_kv_heads", "rope_theta", "rms_norm_eps")
    if changed := [name for name in kept if getattr(small, name) != getattr(large, name)]:
        raise ValueError(f"growing keeps {', '.join(kept)}, and these differ: {', '.join(changed)}")
    torch.manual_seed(seed)
    out = {name: tensor.detach().clone() for name, tensor in TinyLlama(large).named_parameters()}
    norm_scale = (small.hidden_size / large.hidden_size) ** 0.5
    width = slice(0, small.hidden_size)
    out["embed.weight"].zero_()[:, width] = state["embed.weight"]
    out["norm"][width] = state["norm"] * norm_scale
    for layer in range(large.num_layers):
        name = f"blocks.{layer}."
        out[name + "o.weight"].zero_()
        out[name + "down.weight"].zero_()
        if layer < small.num_layers:
            _grow_block({key: state[name + key] for key in BLOCK}, {key: out[name + key] for key in BLOCK}, small, large, norm_scale)
    return out


def _grow_block(old: State, new: State, small: TinyConfig, large: TinyConfig, norm_scale: float) -> None:
    """Write one layer into the (zeroed or random) weights of the larger one."""
    width = slice(0, small.hidden_size)
    queries = _query_rows(small, large)
    num_queries = large.num_heads * large.head_dim
    keys_and_values = torch.arange(num_queries, len(new["qkv.weight"]))
    new["qkv.weight"][torch.cat((queries, keys_and_values)), width] = old["qkv.weight"]
    new["o.weight"][width, queries] = old["o.weight"]
    old_units, units = small.intermediate_size, large.intermediate_size
    for start, old_start in ((0, 0), (units, old_units)):
        new["gate_up.weight"][start : start + old_units, width] = old["gate_up.weight"][old_start : old_start + old_units]
    new["down.weight"][width, :old_units] = old["down.weight"]
    for norm in ("attn_norm", "mlp_norm"):
        new[norm][width] = old[norm] * norm_scale


def _query_rows(small: TinyConfig, large: TinyConfig) -> Tensor:
    """Rows of the large query projection that hold the small one's: new heads join the end of each KV head's group."""
    group, old_group = large.num_heads // large.num_kv_heads, small.num_heads // small.num_kv_heads
    rows = torch.arange(large.num_heads * large.head_dim).view(large.num_kv_heads, group, large.head_dim)
    return rows[:, :old_group].flatten()


@torch.no_grad()
def change_vocabulary(state: State, old: Tokenizer, new: Tokenizer) -> State:
    """The same weights with an embedding for every token of `new`."""
    table, ids = state["embed.weight"], old.get_vocab()
    rows = torch.zeros(new.get_vocab_size(), table.shape[1])
    for token, at in new.get_vocab().items():
        pieces = [ids[token]] if token in ids else _pieces(token, old, ids)
        rows[at] = table[pieces].mean(0)
    return state | {"embed.weight": rows}


def _pieces(token: str, old: Tokenizer, ids: Mapping[str, int]) -> list[int]:
    """What the old vocabulary spells a token's text by; of a token that is no text, being part of a character, its bytes."""
    text = decoders.ByteLevel().decode([token])
    if "\ufffd" in text:
        return [ids[byte] for byte in token]
    spelled: list[int] = old.encode(text).ids
    return spelled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exported", type=Path, required=True, help="folder in the Hugging Face layout")
    parser.add_argument("--training", type=Path, required=True, help="its results, for the summary beside the checkpoint")
    parser.add_argument("--as", dest="large", choices=sorted(CONFIGS), default="tiny", help="the shape to grow into")
    parser.add_argument("--new-tokenizer", action="store_true", help="train one on today's corpus; otherwise the old one stays")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to change to, such as the one of a model whose draft this will be")
    parser.add_argument("--to", type=Path, required=True, help="folder of the run that goes on from here")
    options = parser.parse_args()
    small = config_from_hf(json.loads((options.exported / "config.json").read_text()))
    state = state_from_hf(load_file(options.exported / "model.safetensors"), small)
    tokenizer = old = Tokenizer.from_file(str(options.exported / "tokenizer.json"))
    if options.new_tokenizer or options.tokenizer:
        given = options.tokenizer
        tokenizer = Tokenizer.from_file(str(given)) if given else new_tokenizer(CONFIGS[options.large])
        state, small = change_vocabulary(state, old, tokenizer), replace(small, vocab_size=tokenizer.get_vocab_size())
    options.to.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.to / "tokenizer.json"))
    save_file(grow(state, small, CONFIGS[options.large]), options.to / f"{options.large}.safetensors")
    grown = {"grown_to": num_parameters(CONFIGS[options.large]), "new_tokenizer": tokenizer is not old}
    summary = json.loads(options.training.read_text())["training"] | grown
    (options.to / f"{options.large}.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
