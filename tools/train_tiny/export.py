"""Writes a checkpoint as a Hugging Face folder: bf16 safetensors, config, tokenizer, template.

python -m tools.train_tiny.export --run /tmp/tiny --model tiny --to src/headrace/bundled/headrace-tiny
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.train_tiny.model import hf_config, state_to_hf
from tools.train_tiny.tokenizer import save_tokenizer
from tools.train_tiny.train import CONFIGS

GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 3, "do_sample": False, "max_new_tokens": 256}


def export(run: Path, model: str, folder: Path) -> None:
    """Files of one model; its card is written by `cards.py` once it is evaluated."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[model]
    tensors = state_to_hf(load_file(run / f"{model}.safetensors"), config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", hf_config(config))
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    save_tokenizer(Tokenizer.from_file(str(run / "tokenizer.json")), folder)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="tiny")
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    export(options.run, options.model, options.to)


if __name__ == "__main__":
    main()
