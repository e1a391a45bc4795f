"""Writes log-probabilities in the shapes clients know: OpenAI's of chat and of completions, and vLLM's `prompt_logprobs`.

Functions give pieces that, joined, are one JSON value; each is less than a millisecond of work.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary, proxy

import msgspec

from headrace.core.plan import PAGE_TOKENS, LogprobColumns
from headrace.gateway.upstream.seam import PreparedPrompt
from headrace.text.logprobs import DecodedLogprobs, TokenTexts

_encode = msgspec.json.encode

MAX_TOKENS = 16_384
"""About 200 bytes each."""


class _Pieces(dict[int, bytes]):
    """A dict, since an output token may take hundreds of look-ups."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        self._make = make

    def __missing__(self, token_id: int) -> bytes:
        if len(self) >= MAX_TOKENS:
            self.clear()
        piece = self[token_id] = self._make(token_id)
        return piece


class TokenJson:
    """The pieces of JSON in which one tokenizer's tokens are written.

    names    `"text"`, as completions name a token
    keys     `"text":`, the key of its log-probability
    begins   `{"token":"text","logprob":`, how a chat's entry begins
    ends     `,"bytes":[1,2]}`, how a chat's alternative ends
    decoded  `,"decoded_token":"text"}`, how an entry of `prompt_logprobs` ends
    """

    def __init__(self, owner: TokenTexts) -> None:
        texts: TokenTexts = proxy(owner)
        self.names = names = _Pieces(lambda i: _encode(token_name(texts.token_text(i), texts.token_bytes(i))))
        self.keys = _Pieces(lambda i: names[i] + b":")
        self.begins = _Pieces(lambda i: b'{"token":%b,"logprob":' % _encode(texts.token_text(i)))
        self.ends = _Pieces(lambda i: b',"bytes":%b}' % _encode(list(texts.token_bytes(i))))
        self.decoded = _Pieces(lambda i: b',"decoded_token":%b}' % _encode(texts.token_text(i)))


_made: WeakKeyDictionary[TokenTexts, TokenJson] = WeakKeyDictionary()


def json_of(texts: TokenTexts) -> TokenJson:
    table = _made.get(texts)
    if table is None:
        table = _made[texts] = TokenJson(texts)
    return table


def token_name(text: str, raw: bytes) -> str:
    """The text, or `bytes:\\x..` for a part of a character, since such tokens have the same text."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


LOWEST_LOGPROB = -9999.0
"""Minus infinity, of a token that the model rules out: JSON has no infinity. Clients of this API read it as "never"."""


def chat_logprobs(parts: Iterable[DecodedLogprobs], num_top: int) -> Iterator[bytes]:
    """content[].{token, logprob, bytes, top_logprobs}; a token without text in the answer (the end token) is left out."""
    yield b'{"content":['
    yield from _between_commas(_chat_page(page, num_top) for page in _pages(parts))
    yield b'],"refusal":null}'


def completion_logprobs(
    parts: Sequence[DecodedLogprobs], num_top: int, *, offset: int = 0, prompt: EchoedLogprobs | None = None
) -> Iterator[bytes]:
    """offset: characters of an echoed prompt; its entries precede those of the output"""
    for number, (name, column) in enumerate(COMPLETION_COLUMNS.items()):
        yield b'%b"%b":[' % (b"," if number else b"{", name)
        before = prompt[number] if prompt is not None else []
        yield from before
        for place, page in enumerate(_pages(parts)):
            yield (b"," if before or place else b"") + column(page, num_top, offset)
        yield b"]"
    yield b"}"


EchoedLogprobs = tuple[list[bytes], ...]
"""For each of COMPLETION_COLUMNS pieces that, joined, are a JSON list without its brackets. Encoded once."""


def echo_logprobs(prompt: PreparedPrompt, logprobs: LogprobColumns, num_top: int) -> Generator[bytes, None, EchoedLogprobs]:
    """Yields an empty piece after each page. The first token has null, as OpenAI gives it. logprobs: of positions from 1 on"""
    columns: EchoedLogprobs = tuple([] for _ in COMPLETION_COLUMNS)
    for page in prompt.decoded_logprobs(logprobs):
        for encode, column in zip(COMPLETION_COLUMNS.values() if len(page) else (), columns, strict=False):
            has_none = encode in (_token_logprobs, _top_logprobs) and not column
            made = b"null" if has_none else encode(page, num_top, 0)
            column.append(b"," + made if column else made)
        yield b""
    return columns


def prompt_logprobs(prompt: PreparedPrompt, logprobs: LogprobColumns, num_top: int) -> Iterator[bytes]:
    """vLLM's shape: one map per prompt token from token id to its log-probability; null for the first token."""
    yield b"[null"
    for page in prompt.decoded_logprobs(logprobs):
        is_first = len(page) and not page.columns.ranks[0]
        yield b"," + _ranked_page(page, num_top) if len(page) and not is_first else b""
    yield b"]"


def _pages(parts: Iterable[DecodedLogprobs]) -> Iterator[DecodedLogprobs]:
    for part in parts:
        yield from part.shown().pages(PAGE_TOKENS)


def _between_commas(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for number, piece in enumerate(pieces):
        yield b"," + piece if number else piece


def _numbers(logprobs: array[float]) -> list[bytes]:
    """One call is five times as fast as a call for each."""
    values = logprobs.tolist()
    if not values:
        return []
    if not min(values) >= LOWEST_LOGPROB:
        values = [max(value, LOWEST_LOGPROB) for value in values]
    return _inside(values).split(b",")


def _inside(values: Sequence[object]) -> bytes:
    return _encode(values)[1:-1]


def _chat_page(page: DecodedLogprobs, num_top: int) -> bytes:
    columns, json = page.columns, json_of(page.texts)
    begins, ends = json.begins, json.ends
    tops = [begins[i] + number + ends[i] for i, number in zip(columns.top_ids, _numbers(columns.top_logprobs), strict=True)]
    entries: list[bytes] = []
    end = 0
    for token_id, number, count in zip(columns.token_ids, _numbers(columns.logprobs), columns.top_counts, strict=True):
        begin, end = end, end + count
        best = b",".join(tops[begin : begin + min(count, num_top)])
        entries.append(b'%b%b%b,"top_logprobs":[%b]}' % (begins[token_id], number, ends[token_id][:-1], best))
    return b",".join(entries)


def _ranked_page(page: DecodedLogprobs, num_top: int) -> bytes:
    columns, decoded = page.columns, json_of(page.texts).decoded
    top_numbers = _numbers(columns.top_logprobs)
    entries: list[bytes] = []
    end = 0
    for token_id, number, rank, count in zip(columns.token_ids, _numbers(columns.logprobs), columns.ranks, columns.top_counts, strict=True):
        begin, end = end, end + count
        shown = slice(begin, begin + min(count, num_top))
        best = enumerate(zip(columns.top_ids[shown], top_numbers[shown], strict=True), start=1)
        ranked = {i: b'"%d":{"logprob":%b,"rank":%d%b' % (i, its, place, decoded[i]) for place, (i, its) in best}
        ranked[token_id] = b'"%d":{"logprob":%b,"rank":%d%b' % (token_id, number, rank, decoded[token_id])
        entries.append(b"{%b}" % b",".join(ranked.values()))
    return b",".join(entries)


def _text_offsets(page: DecodedLogprobs, _num_top: int, offset: int) -> bytes:
    return _inside([offset + each for each in page.text_offsets])


def _token_logprobs(page: DecodedLogprobs, _num_top: int, _offset: int) -> bytes:
    return b",".join(_numbers(page.columns.logprobs))


def _tokens(page: DecodedLogprobs, _num_top: int, _offset: int) -> bytes:
    names = json_of(page.texts).names
    return b",".join([names[token_id] for token_id in page.columns.token_ids])


def _top_logprobs(page: DecodedLogprobs, num_top: int, _offset: int) -> bytes:
    """The best alternatives, worst first, and the chosen token. Tokens of equal names share one entry."""
    columns, keys = page.columns, json_of(page.texts).keys
    names = [keys[i] for i in columns.top_ids]
    numbers = _numbers(columns.top_logprobs)
    entries: list[bytes] = []
    end = 0
    for token_id, number, count in zip(columns.token_ids, _numbers(columns.logprobs), columns.top_counts, strict=True):
        begin, end = end, end + count
        shown = slice(begin, begin + min(count, num_top))
        named = dict(zip(reversed(names[shown]), reversed(numbers[shown]), strict=True))
        named[keys[token_id]] = number
        entries.append(b"{%b}" % b",".join([name + its for name, its in named.items()]))
    return b",".join(entries)


COMPLETION_COLUMNS: dict[bytes, Callable[[DecodedLogprobs, int, int], bytes]] = {
    b"text_offset": _text_offsets,
    b"token_logprobs": _token_logprobs,
    b"tokens": _tokens,
    b"top_logprobs": _top_logprobs,
}
"""(page, number of alternatives to show, characters before the output) -> a JSON list without its brackets."""
