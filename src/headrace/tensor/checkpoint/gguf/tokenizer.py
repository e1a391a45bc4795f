"""Makes tokenizer.json, tokenizer_config.json and generation_config.json from the metadata keys `tokenizer.*` of a GGUF file.

"gpt2" is a byte-level BPE: the file lists the merges and names the pre-tokenizer. "llama" is a SentencePiece BPE: the file lists pieces
with scores, the pair with the best score is merged first, and the rank of a piece is the rank of its score. Added tokens are matched in
the text before either kind splits it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import shorten
from headrace.tensor.checkpoint.config import ConfigFile

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
"""Others than the main template have their name behind it, such as tool_use."""
METASPACE = "\u2581"
NAMED_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
)
"""They end an answer whatever the keys and their types say, as in llama.cpp: files name one end token, models have more."""
MAX_TOKEN_CHARS = 512
MAX_MERGES = 2**21
"""The largest vocabularies have a quarter."""
LEAST_KNOWN = 0.5
"""Share of the normal tokens whose rank a file must say. Files call some added tokens normal, too."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPLIT_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLIT_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_WORD_START, _WORD_END = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLIT_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD_START}*{_WORD_END}+|[^\r\n\p{{L}}\p{{N}}]?{_WORD_START}+{_WORD_END}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""A word ends before an upper-case letter that follows a lower-case one."""


@dataclass(frozen=True, slots=True)
class CutRule:
    """patterns   regular expressions, each applied to the pieces that the one before it leaves
    whole      a piece that is a token is never merged from smaller ones
    has_bos    a text begins with the token bos unless the file says otherwise
    is_nfc     texts are brought to Unicode's form NFC first
    """

    patterns: tuple[str, ...]
    whole: bool = False
    has_bos: bool = False
    is_nfc: bool = False


CUT_RULES = {
    "gpt-2": CutRule((_SPLIT_GPT2,)),
    "llama-bpe": CutRule((_SPLIT_LLAMA3,), whole=True, has_bos=True),
    "qwen2": CutRule((_SPLIT_LLAMA3.replace("{1,3}", ""),), is_nfc=True),
    "tekken": CutRule((_SPLIT_TEKKEN,), whole=True, has_bos=True),
    "default": CutRule((r"[\p{P}\$\+<=>\^~\|]+", _SPLIT_GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "headrace": CutRule((r"'(?:s|t|re|ve|m|ll|d)|[ _]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",)),
}
CUT_RULES |= {"llama3": CUT_RULES["llama-bpe"], "llama-v3": CUT_RULES["llama-bpe"], "deepseek-r1-qwen": CUT_RULES["qwen2"]}
"""By the key tokenizer.ggml.pre. The bundled models have "headrace"."""


@dataclass(frozen=True, slots=True)
class TextFiles:
    """JSON documents."""

    tokenizer: dict[str, object]
    config: dict[str, object]
    generation: dict[str, object]


def make_text_files(keys: ConfigFile, vocab_size: int) -> TextFiles:
    """vocab_size: rows of the model's embedding. Raises CheckpointError naming the key."""
    vocabulary = _read_vocabulary(keys, vocab_size)
    kind = keys.text(f"{PREFIX}model")
    if kind not in ("gpt2", "llama"):
        keys.refuse(f"{PREFIX}model", "only gpt2 (byte-level BPE) and llama (SentencePiece BPE) are supported")
    tokenizer = _byte_level(keys, vocabulary) if kind == "gpt2" else _sentencepiece(keys, vocabulary)
    named = {name: vocabulary.named(key) for name, key in NAMED_TOKENS.items()}
    texts = {name: vocabulary.tokens[token_id] for name, token_id in named.items() if token_id is not None}
    config: dict[str, object] = {**texts, "tokenizer_class": "PreTrainedTokenizerFast"}
    if templates := _templates(keys):
        config["chat_template"] = templates
    generation: dict[str, object] = {"eos_token_id": vocabulary.end_tokens()}
    return TextFiles(tokenizer, config, generation)


def _templates(keys: ConfigFile) -> dict[str, str]:
    prefix = f"{TEMPLATE}."
    named = {name.removeprefix(prefix): keys.text(name) for name in keys.values if name.startswith(prefix)}
    for name in keys.items(f"{TEMPLATE}s"):
        if name not in named:
            keys.refuse(f"{TEMPLATE}s", f"lists {shorten(name)}, and there is no key {TEMPLATE}.{shorten(name)}")
    return {"default": keys.text(TEMPLATE), **named} if keys.has(TEMPLATE) else named


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """tokens: by id; kinds: of each, by GGUF's numbers."""

    keys: ConfigFile
    tokens: list[str]
    kinds: list[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def named(self, key: str) -> int | None:
        full = f"{PREFIX}{key}"
        return self.keys.integer(full, 0, len(self.tokens) - 1) if self.keys.has(full) else None

    def end_tokens(self) -> list[int]:
        named = [self.named(key) for key in END_KEYS]
        known = [number for number, token in enumerate(self.tokens) if token in END_TEXTS]
        return list(dict.fromkeys([*(number for number in named if number is not None), *known]))

    def normal(self) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind == _NORMAL]

    def added(self) -> list[dict[str, object]]:
        """Special are control tokens, the unknown one, and those that a key names. Phi-3's take the white space after them."""
        special = {self.named(key) for key in NAMED_TOKENS.values()}
        strips = self.keys.values.get("general.architecture") == "phi3" and self.keys.values.get(f"{PREFIX}model") == "llama"
        found = []
        for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            is_special = kind in (_CONTROL, _UNKNOWN) or number in special or token in END_TEXTS
            if is_special or kind == _USER_DEFINED:
                takes_space = strips and kind == _CONTROL and token not in ("<s>", "<|endoftext|>")
                flags = {"single_word": False, "lstrip": False, "rstrip": takes_space, "normalized": False, "special": is_special}
                found.append({"id": number, "content": token, **flags})
        return found


def _read_vocabulary(keys: ConfigFile, vocab_size: int) -> _Vocabulary:
    tokens, kinds = keys.items(f"{PREFIX}tokens"), keys.items(f"{PREFIX}token_type")
    shown = ConfigFile(keys.file, {})  # errors must not show the whole list
    if not 0 < len(tokens) <= vocab_size:
        shown.refuse(f"{PREFIX}tokens", f"lists {len(tokens)} tokens, the embedding has {vocab_size} rows")
    texts = [token for token in tokens if isinstance(token, str)]
    if len(texts) < len(tokens) or "" in texts:
        shown.refuse(f"{PREFIX}tokens", "holds what is no text")
    if (longest := max(len(text) for text in texts)) > MAX_TOKEN_CHARS:
        shown.refuse(f"{PREFIX}tokens", f"holds a token of {longest} characters, and {MAX_TOKEN_CHARS} are allowed")
    if len(first_ids := {token: number for number, token in reversed(list(enumerate(texts)))}) < len(texts):
        number = next(number for number, token in enumerate(texts) if first_ids[token] != number)
        shown.refuse(f"{PREFIX}tokens", f"{shorten(texts[number])} has the ids {first_ids[texts[number]]} and {number}")
    numbers = [kind for kind in kinds if isinstance(kind, int)] if kinds else [_NORMAL] * len(texts)
    if len(numbers) != len(texts):
        shown.refuse(f"{PREFIX}token_type", f"lists {len(numbers)} types that are numbers, of {len(texts)} tokens")
    return _Vocabulary(keys, texts, numbers)


def _byte_level(keys: ConfigFile, vocabulary: _Vocabulary) -> dict[str, object]:
    name = keys.text(f"{PREFIX}pre", "default")
    if name not in CUT_RULES:
        keys.refuse(f"{PREFIX}pre", "is not supported", f"Supported: {', '.join(CUT_RULES)}.")
    rule = CUT_RULES[name]
    cuts: list[object] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in rule.patterns
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        **_document(vocabulary, has_bos=rule.has_bos),
        "normalizer": {"type": "NFC"} if rule.is_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, to_bytes]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, _listed_merges(keys, vocabulary), ignore_merges=rule.whole),
    }


def _listed_merges(keys: ConfigFile, vocabulary: _Vocabulary) -> list[list[str]]:
    """Raises CheckpointError for a merge that makes no token, and where most tokens are made by none."""
    ids, shown, merges = vocabulary.ids, ConfigFile(keys.file, {}), []
    for merge in keys.items(f"{PREFIX}merges"):
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not space or not {left, right, left + right} <= ids.keys():
            shown.refuse(f"{PREFIX}merges", f"{shorten(merge)} is no pair of tokens that make a token")
        merges.append([left, right])
    longer = {token for token in vocabulary.normal() if len(token) > 1}
    made = longer.intersection(left + right for left, right in merges)
    if len(made) < len(longer) * LEAST_KNOWN:
        reason = f"makes {len(made)} of {len(longer)} tokens of more than one byte: texts would fall into single bytes"
        shown.refuse(f"{PREFIX}merges", reason, "Convert the model again, with its tokenizer's merges.")
    return merges


def _sentencepiece(keys: ConfigFile, vocabulary: _Vocabulary) -> dict[str, object]:
    """As SentencePiece's BPE, which replaces spaces and puts one before the text, and spells unknown characters as bytes."""
    has_prefix = keys.flag(f"{PREFIX}add_space_prefix", True)
    spaces: list[object] = [{"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}]
    back: list[object] = [
        {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        spaces.insert(0, {"type": "Prepend", "prepend": METASPACE})
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.named("unknown_token_id")
    names = {} if unknown is None else {"unk_token": vocabulary.tokens[unknown]}
    return {
        **_document(vocabulary, has_bos=True),
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {**_bpe(vocabulary, _merges_by_score(keys, vocabulary)), **names, "fuse_unk": True, "byte_fallback": True},
    }


def _merges_by_score(keys: ConfigFile, vocabulary: _Vocabulary) -> list[list[str]]:
    """Every way to make a piece of two others, by the score of the piece; the ways of one piece, and equal scores, by the parts' ids."""
    scores, ids, shown = keys.items(f"{PREFIX}scores"), vocabulary.ids, ConfigFile(keys.file, {})
    if len(scores) != len(ids) or not all(isinstance(score, float) for score in scores):
        shown.refuse(f"{PREFIX}scores", f"must be a number for each of {len(ids)} tokens")
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece in vocabulary.normal():
        score = scores[ids[piece]]
        assert isinstance(score, float)
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if (first := ids.get(left)) is not None and (second := ids.get(right)) is not None:
                ranked.append((-score, first, second, left, right))
        if len(ranked) > MAX_MERGES:
            reason = f"can be made of each other in more than {MAX_MERGES} ways, as no vocabulary that was trained"
            shown.refuse(f"{PREFIX}tokens", reason)
    made = {left + right: score for score, _, _, left, right in ranked}
    if len(distinct := set(made.values())) < len(made) * LEAST_KNOWN:
        reason = f"has {len(distinct)} different scores for {len(made)} pieces of more than one character: nothing says which is made first"
        shown.refuse(f"{PREFIX}scores", reason, "Convert the model again, with its SentencePiece model.")
    return [[left, right] for *_, left, right in sorted(ranked)]


def _bpe(vocabulary: _Vocabulary, merges: list[list[str]], *, ignore_merges: bool = False) -> dict[str, object]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _document(vocabulary: _Vocabulary, *, has_bos: bool) -> dict[str, object]:
    """has_bos: where the file does not say."""
    keys = vocabulary.keys
    around = {"bos": keys.flag(f"{PREFIX}add_bos_token", has_bos), "eos": keys.flag(f"{PREFIX}add_eos_token", False)}
    ids = {name: vocabulary.named(f"{name}_token_id") for name, is_added in around.items() if is_added}
    used = {name: number for name, number in ids.items() if number is not None}
    ends = {name: {"SpecialToken": {"id": vocabulary.tokens[number], "type_id": 0}} for name, number in used.items()}
    text: list[object] = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = [*([ends["bos"]] if "bos" in ends else []), *text, *([ends["eos"]] if "eos" in ends else [])]
    tokens = {
        vocabulary.tokens[number]: {"id": vocabulary.tokens[number], "ids": [number], "tokens": [vocabulary.tokens[number]]}
        for number in used.values()
    }
    post = {"type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "post_processor": {**post, "special_tokens": tokens} if used else None,
    }
