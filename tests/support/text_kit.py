"""Writes small real tokenizers as model folders: one byte-level (Llama 3's kind), one metaspace with byte fallback (Llama 2's kind)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import headrace.text.tokenizer

CORPUS = [
    "Hello world! The quick brown fox jumps over the lazy dog. What is the capital of France? Paris.",
    "user assistant system tool im_start im_end think stop STOP end of the text 0123456789",
    "caf\u00e9 na\u00efve \u65e5\u672c\u8a9e \U0001f389\U0001f600 \n\n  spaces   and\ttabs",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and '</think>' in message.content %}{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def save_byte_level(folder: Path, *, chat_template: str | None = CHATML, bos: bool = True) -> Path:
    """A byte-level BPE with control tokens <|begin|>, <|im_start|>, <|im_end|> and the non-special tags <think>, </think>.

    bos  the post-processor puts <|begin|> before a text
    """
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        CORPUS * 8, trainers.BpeTrainer(vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|begin|>", "<|im_start|>", "<|im_end|>")])
    inner.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", inner.token_to_id("<|begin|>"))]
        )
    return _save(folder, inner, chat_template, bos_token="<|begin|>", eos_token="<|im_end|>")


def let_tokens_swallow_spaces(folder: Path) -> None:
    """Change a saved tokenizer: its added tokens take the white space after them, any amount."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["added_tokens"] = [{**token, "rstrip": True} for token in document["added_tokens"]]
    write_json(path, document)


def save_metaspace(folder: Path, *, chat_template: str | None = None) -> Path:
    """A BPE spelled with U+2581 for spaces and <0xNN> for bytes outside its alphabet, as sentencepiece models convert to."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    letters = [chr(code) for code in range(0x21, 0x7F) if chr(code) not in pieces]
    merges = [("\u2581", letter) for letter in "abcdefghijklmnopqrstuvwxyz"] + [("\u2581h", "e"), ("l", "l")]
    vocab = {piece: number for number, piece in enumerate([*pieces, *letters, *("".join(pair) for pair in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])])
    return _save(folder, inner, chat_template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _save(folder: Path, inner: Any, chat_template: str | None, **special: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", special)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


def eos_token_id(tokenizer: headrace.text.tokenizer.Tokenizer) -> int:
    token_id = tokenizer.token_to_id(tokenizer.special_tokens["eos_token"])
    assert token_id is not None
    return token_id
