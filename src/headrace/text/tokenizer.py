"""Turns text into token ids and back, by a local folder's tokenizer.json and what `tokenizer_config` reads beside it.

User text cannot smuggle in control tokens: `<|im_end|>` becomes ordinary tokens unless the caller says otherwise.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import CheckpointError, InvalidRequest
from headrace.text.files import parse_object, read_bytes
from headrace.text.token_bytes import Spelling, TokenBound, spelling_of, token_bound
from headrace.text.tokenizer_config import TokenizerConfig, read_tokenizer_config

if TYPE_CHECKING:
    import tokenizers

_PIPED = re.compile(r"<[|\uff5c].*[|\uff5c]>\Z", re.DOTALL)
"""Texts treated as control tokens even where a folder does not mark them special."""


class Tokenizer:
    """Immutable and safe to use from several threads; `encode` releases the GIL."""

    def __init__(self, config: TokenizerConfig, data: bytes) -> None:
        document = parse_object("tokenizer.json", data)
        self._inner = _build(data)
        config.extend(self._inner)
        self._spelling: Spelling = spelling_of(document.get("decoder"))
        self._added = dict(self._inner.get_added_tokens_decoder())
        self.special_ids: frozenset[int] = frozenset(i for i, token in self._added.items() if token.special)
        vocab = self._inner.get_vocab(with_added_tokens=True)
        if not vocab:
            raise CheckpointError("tokenizer.json", "the vocabulary is empty")
        self.vocab_size: int = max(vocab.values()) + 1
        self.bound: TokenBound | None = token_bound(document, vocab.keys(), list(self._added.values()))
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self.whole_texts = WholeTexts(self)
        self.digest: str = sha256(data).hexdigest()
        self.special_tokens: dict[str, str] = config.special_tokens
        self.bos_token_id: int | None = self.token_to_id(self.special_tokens.get("bos_token", ""))
        self._prefix, self._suffix = self._added_around()
        self._newline = self._ids("\n")
        self._plain: dict[str, list[int]] = {}

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Raises CheckpointError."""
        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            for name in ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json"):
                if (path / name).is_file():
                    raise CheckpointError(
                        name, "a folder without tokenizer.json is not supported", "Convert it: AutoTokenizer(...).save_pretrained(...)."
                    )
            raise CheckpointError("tokenizer.json", "is missing from the model folder")
        return cls(read_tokenizer_config(path), read_bytes(path / "tokenizer.json").removeprefix(BOM_UTF8))

    def first_id_beyond(self, limit: int) -> tuple[str, int] | None:
        """The least (token, id) with id >= `limit` that a text can be given, or that opens a text."""
        if self.vocab_size <= limit:
            return None
        vocab = self._inner.get_vocab(with_added_tokens=True)
        asked = ((token_id, token) for token, token_id in vocab.items() if token_id >= limit and self._is_asked(token_id))
        least = min(asked, default=None)
        return None if least is None else (least[1], least[0])

    def _is_asked(self, token_id: int) -> bool:
        return token_id not in self.special_ids or token_id == self.bos_token_id

    # -- text to ids -------------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool, allow_control_tokens: bool = False, field: str = "prompt") -> list[int]:
        """allow_control_tokens  only for text of the operator or the program

        Raises InvalidRequest for a lone surrogate.
        """
        check_text(text, field)
        if allow_control_tokens:
            return self._ids(text, add_special_tokens=add_special_tokens)
        if self._control_pattern.search(text) is None:
            ids = self._ids(text)
        else:
            pieces = self._control_pattern.split(text)
            ids = self.encode_pieces([(piece, number % 2 == 1) for number, piece in enumerate(pieces)], field=field)
        if self._gives_control(ids):  # a normalizer turned other letters into a control token
            ids = self._plain_ids(text, field)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def hides_control_token(self, text: str) -> bool:
        """Whether the normalizer (NFKC) turns `text` into a control token that is not literally in it."""
        return self._normalizes_control and self._control_pattern.search(text) is None and self._gives_control(self._ids(text))

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], *, field: str = "prompt") -> list[int]:
        """(piece, is_plain) parts: nothing joins across a cut, and no special tokens are added.

        A plain piece is spelled with ordinary tokens only.
        """
        pieces = [(piece, is_plain) for piece, is_plain in pieces if piece]
        ordinary = iter(self._batch([piece for piece, is_plain in pieces if not is_plain], is_inner=bool(pieces) and pieces[0][1]))
        ids: list[int] = []
        for piece, is_plain in pieces:
            ids += self._plain_ids(piece, field) if is_plain else next(ordinary)
        return ids

    # -- ids to text -------------------------------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Invalid UTF-8 becomes U+FFFD."""
        text = self.join(token_ids, skip_special_tokens=skip_special_tokens).decode("utf-8", "replace")
        strip = self._spelling.strip_left
        return text[min(strip, len(text) - len(text.lstrip(" "))) :] if strip else text

    def join(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> bytes:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join([self.token_bytes(i) for i in token_ids if i not in skipped])

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            added = self._added.get(token_id)
            if added is not None:
                known = added.content.encode()
            else:
                token = self._inner.id_to_token(token_id)
                known = b"" if token is None else self._spelling.to_bytes(token)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._inner.token_to_id(token) if token else None
        return token_id

    # -- control tokens ----------------------------------------------------------------------------------------------------------

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Sorted spellings that users' text must not be able to produce."""
        return tuple(sorted(t.content for t in self._added.values() if t.special or _PIPED.match(t.content)))

    @property
    def added_tokens(self) -> tuple[str, ...]:
        return tuple(token.content for token in self._added.values())

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return any_of(self.control_tokens)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # The batch call releases the GIL, the single one does not: a megabyte of text would block every other thread for a second.
        ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _batch(self, pieces: Sequence[str], *, is_inner: bool) -> list[list[int]]:
        """is_inner: the first piece, too, has text before it"""
        if not pieces:
            return []
        if self._spelling.is_byte_level:
            return [encoding.ids for encoding in self._inner.encode_batch_fast(pieces, add_special_tokens=False)]
        first = [] if is_inner else [self._ids(pieces[0])]
        rest = pieces[len(first) :]
        behind = self._inner.encode_batch_fast(["\n" + piece for piece in rest], add_special_tokens=False)
        return first + [self._after_newline(e.ids) or self._ids(piece) for e, piece in zip(behind, rest, strict=True)]

    def _after_newline(self, ids: list[int]) -> list[int] | None:
        newline = self._newline
        return ids[len(newline) :] if ids[: len(newline)] == newline else None

    def _plain_ids(self, piece: str, field: str) -> list[int]:
        """Spelled letter by letter if one of the ids is a control token."""
        known = self._plain.get(piece)
        if known is None:
            known = self._spelled_out(piece, field)
            if piece in self.control_tokens:
                self._plain[piece] = known
        return known

    def _spelled_out(self, piece: str, field: str) -> list[int]:
        ids = self._model_ids(piece)
        if self._gives_control(ids):
            ids = [i for char in piece for i in self._model_ids(char)]
        if self._gives_control(ids):
            raise InvalidRequest(field, "text this tokenizer can spell with ordinary tokens", piece, "Remove the control token.")
        return ids

    def _gives_control(self, ids: Sequence[int]) -> bool:
        return not self._control_ids.isdisjoint(ids)

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """Ids of control tokens without the unknown token: any odd letter gives it."""
        unknown = self.special_tokens.get("unk_token")
        names = set(self.control_tokens) - {unknown}
        return frozenset(i for i, token in self._added.items() if token.content in names)

    @cached_property
    def _normalizes_control(self) -> bool:
        return self._inner.normalizer is not None and any(self._added[i].normalized for i in self._control_ids)

    def _model_ids(self, text: str) -> list[int]:
        def run(text: str) -> list[int]:
            inner = self._inner
            if inner.normalizer is not None:
                text = inner.normalizer.normalize_str(text)
            words = [text] if inner.pre_tokenizer is None else [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text)]
            return [token.id for word in words for token in inner.model.tokenize(word)]

        if self._spelling.is_byte_level:
            return run(text)
        return self._after_newline(run("\n" + text)) or run(text)

    def _added_around(self) -> tuple[list[int], list[int]]:
        bare, full = self._ids("a"), self._ids("a", add_special_tokens=True)
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise CheckpointError("tokenizer.json", "the post-processor changes the tokens of the text itself")


class WholeTexts(dict[int, str]):
    """Texts of whole characters, made at first use: there is a lookup for each streamed token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        try:
            text = self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = ""
        if 0 <= token_id < self._tokenizer.vocab_size:
            self[token_id] = text
        return text


def check_text(text: str, field: str) -> None:
    """Raises InvalidRequest for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "valid Unicode without lone surrogates", text[error.start : error.end]) from None


@lru_cache(maxsize=64)
def any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the longest first; without tokens it never matches."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True))) or '(?!)'})")


def _build(data: bytes) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError("tokenizer.json", f"cannot be loaded ({str(error)[:200]})") from error
    # A folder saved while training may set truncation and padding; a server never cuts or pads silently.
    inner.no_truncation()
    inner.no_padding()
    return inner
