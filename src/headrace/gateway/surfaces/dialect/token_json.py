"""Tokens as JSON, each encoded once: log-probabilities name the same few thousand tokens again and again.

A table belongs to a model's tokenizer and is freed with it. A full table is emptied.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, proxy

import msgspec

from headrace.text.logprobs import TokenTexts

_encode = msgspec.json.encode

MAX_TOKENS = 16_384
"""Entries of one table, of about 200 bytes each."""


class _Pieces(dict[int, bytes]):
    """Token id -> its piece of JSON, made when it is first asked for. A dict, because hundreds are looked up per output token."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = proxy(texts)  # which owns this table

    def __missing__(self, token_id: int) -> bytes:
        if len(self) >= MAX_TOKENS:
            self.clear()
        piece = self[token_id] = self._made(token_id)
        return piece

    def _made(self, token_id: int) -> bytes:
        raise NotImplementedError


class Names(_Pieces):
    """`"text"`, as completions name a token."""

    def _made(self, token_id: int) -> bytes:
        return _encode(token_name(self._texts.token_text(token_id), self._texts.token_bytes(token_id)))


class Keys(Names):
    """`"text":`, the key of its log-probability."""

    def _made(self, token_id: int) -> bytes:
        return super()._made(token_id) + b":"


class Begins(_Pieces):
    """`{"token":"text","logprob":`, how a chat's entry begins."""

    def _made(self, token_id: int) -> bytes:
        return b'{"token":%b,"logprob":' % _encode(self._texts.token_text(token_id))


class Ends(_Pieces):
    """`,"bytes":[1,2]}`, how a chat's alternative ends."""

    def _made(self, token_id: int) -> bytes:
        return b',"bytes":%b}' % _encode(list(self._texts.token_bytes(token_id)))


class Decoded(_Pieces):
    """`,"decoded_token":"text"}`, how an entry of `prompt_logprobs` ends."""

    def _made(self, token_id: int) -> bytes:
        return b',"decoded_token":%b}' % _encode(self._texts.token_text(token_id))


class TokenJson:
    """All tables of one tokenizer."""

    def __init__(self, texts: TokenTexts) -> None:
        self.names = Names(texts)
        self.keys = Keys(texts)
        self.begins = Begins(texts)
        self.ends = Ends(texts)
        self.decoded = Decoded(texts)


_made: WeakKeyDictionary[TokenTexts, TokenJson] = WeakKeyDictionary()


def json_of(texts: TokenTexts) -> TokenJson:
    """The tables of `texts`, made once."""
    found = _made.get(texts)
    if found is None:
        found = _made[texts] = TokenJson(texts)
    return found


def token_name(text: str, raw: bytes) -> str:
    """A token as completions name it: its text, or `bytes:\\x..` where it is a part of a character, since such tokens share one text."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text
