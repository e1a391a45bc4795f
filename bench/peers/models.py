"""Makes random-weight checkpoints in the Hugging Face layout, with a byte-level BPE tokenizer trained on Python's own library.

    python -m bench.peers.models --to FOLDER [--shape llama-1.1b]

Speed does not depend on what the weights say. Shapes with a folder already are left alone.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as bpe
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bench.peers.cells import SHAPES

VOCAB_SIZE = 32_000
TOKENIZER_FILES = 2000
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config_of(shape: str) -> PretrainedConfig:
    """llama-1.1b is TinyLlama's shape, qwen2-0.4b Qwen2-0.5B's without most of its vocabulary, the third has heads of 128."""
    common = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
    if shape == "llama-1.1b":
        return LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            max_position_embeddings=8192,
            **common,
        )
    if shape == "qwen2-0.4b":
        return Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            rope_theta=1e6,
            **common,
        )
    return LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=8192,
        **common,
    )


def library_texts() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:TOKENIZER_FILES]:
        yield path.read_text(encoding="utf-8", errors="ignore")


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(bpe.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(library_texts(), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2])
    made.chat_template = TEMPLATE
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="again for more; default: all")
    given = parser.parse_args(arguments)
    wanted = [shape for shape in given.shape or SHAPES if not (given.to / shape / "config.json").exists()]
    tokenizer = make_tokenizer() if wanted else None
    for shape in wanted:
        torch.manual_seed(0)
        config = config_of(shape)
        maker = Qwen2ForCausalLM if isinstance(config, Qwen2Config) else LlamaForCausalLM
        model = maker(config).to(torch.bfloat16)
        model.save_pretrained(given.to / shape)
        assert tokenizer is not None
        tokenizer.save_pretrained(given.to / shape)
        print(f"{shape}: {sum(p.numel() for p in model.parameters()) / 1e6:,.0f} million parameters")


if __name__ == "__main__":
    main()
