"""Tests that log-probabilities encoded from columns are, byte for byte, what encoding objects gives."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import logprob_objects as objects
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.plan import LogprobColumns, TokenLogprobs, columns_of
from headrace.gateway.surfaces.dialect import logprobs
from headrace.gateway.surfaces.dialect.logprobs import chat_logprobs, completion_logprobs, echo_logprobs, json_of, prompt_logprobs
from headrace.gateway.upstream.seam import PreparedPrompt
from headrace.text.logprobs import DecodedLogprobs

pytestmark = pytest.mark.pure

NAMES = [
    b"a",
    b"b",
    b'"\\',
    b"\n\x00\x7f",
    b"\xf0\x9f",
    b"\x98\x80",
    "\U0001f600".encode(),
    b"",
    b"a",
    " é".encode(),
    b"/",
    b"\xed\xa0\x80",
]


@dataclass(eq=False)
class Texts:
    """Twelve tokens; two have the same bytes, some are parts of characters, one has none."""

    names: list[bytes] = field(default_factory=lambda: NAMES)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.names[token_id]


TEXTS = Texts()
ids = st.integers(0, len(NAMES) - 1)
numbers = st.floats(allow_nan=False) | st.floats(-30, 0, width=32)
positions = st.builds(
    lambda token_id, logprob, rank, top: TokenLogprobs(token_id, logprob, rank, tuple(i for i, _ in top), tuple(x for _, x in top)),
    ids,
    numbers,
    st.integers(1, 2**20),
    st.lists(st.tuples(ids, numbers), max_size=4),
)


@st.composite
def parts(draw: st.DrawFn) -> DecodedLogprobs:
    entries = draw(st.lists(positions, min_size=1, max_size=7))
    offsets = draw(st.lists(st.integers(0, 2**40), min_size=len(entries), max_size=len(entries)))
    visible = draw(st.lists(st.booleans(), min_size=len(entries), max_size=len(entries)))
    made = DecodedLogprobs(TEXTS)
    made.add(columns_of(entries), offsets, visible)
    return made


@dataclass(frozen=True, kw_only=True)
class Prompt(PreparedPrompt):
    """Pages as an upstream gives them: the first token alone."""

    given: DecodedLogprobs

    def decoded_logprobs(self, logprobs: LogprobColumns) -> Iterator[DecodedLogprobs]:
        first = columns_of([TokenLogprobs(self.given.columns.token_ids[0], 0.0, 0)])
        yield DecodedLogprobs(TEXTS)
        yield DecodedLogprobs(TEXTS, first, self.given.text_offsets[:1], bytearray(b"\1"))
        yield from self.given.part(1, len(self.given)).pages(2)


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "PAGE_TOKENS", 3)


@given(st.lists(parts(), max_size=3), st.integers(0, 5))
def test_a_chats_bytes_are_those_of_objects(given_parts: list[DecodedLogprobs], num_top: int) -> None:
    entries = [entry for part in given_parts for entry in part]
    assert b"".join(chat_logprobs(given_parts, num_top)) == objects.chat(entries, num_top)


@given(st.lists(parts(), max_size=3), st.integers(0, 5), st.integers(0, 100))
def test_a_completions_bytes_are_those_of_objects(given_parts: list[DecodedLogprobs], num_top: int, offset: int) -> None:
    entries = [entry for part in given_parts for entry in part]
    made = b"".join(completion_logprobs(given_parts, num_top, offset=offset))
    assert made == objects.completion(entries, num_top, offset=offset)


@given(parts(), st.lists(parts(), max_size=2), st.integers(0, 5))
def test_an_echoed_prompts_bytes_are_those_of_objects(before: DecodedLogprobs, given_parts: list[DecodedLogprobs], num_top: int) -> None:
    before.visible[:] = b"\1" * len(before)
    entries = [entry for part in given_parts for entry in part]
    echoed = result_of(echo_logprobs(Prompt("ab", 2, given=before), before.columns, num_top))
    for _ in range(2):  # every choice shows them
        made = b"".join(completion_logprobs(given_parts, num_top, offset=2, prompt=echoed))
        assert made == objects.completion(entries, num_top, offset=2, prompt=list(before))


@given(parts(), st.integers(0, 5))
def test_a_prompts_bytes_are_those_of_objects(given_part: DecodedLogprobs, num_top: int) -> None:
    made = b"".join(prompt_logprobs(Prompt("ab", 2, given=given_part), given_part.columns, num_top))
    assert made == objects.prompt(list(given_part), num_top)


def test_a_table_of_tokens_is_bounded_and_goes_with_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "MAX_TOKENS", 3)
    texts = Texts()
    tables = json_of(texts)
    assert json_of(texts) is tables
    for token_id in range(len(NAMES)):
        assert tables.keys[token_id] == tables.names[token_id] + b":"
        assert len(tables.keys) <= 3
    num_known = len(logprobs._made)
    del texts
    gc.collect()
    assert len(logprobs._made) == num_known - 1


def test_a_page_is_all_that_is_made_before_the_next_one_is_asked_for() -> None:
    made = DecodedLogprobs(TEXTS)
    made.add(columns_of([TokenLogprobs(0, -0.5, 1, (1,) * 20, (-1.0,) * 20)] * 9), range(9), [True] * 9)
    assert len([piece for piece in chat_logprobs([made], 20) if b"top_logprobs" in piece]) == 3


def result_of(work: Generator[bytes, None, logprobs.EchoedLogprobs]) -> logprobs.EchoedLogprobs:
    while True:
        try:
            assert next(work) == b""
        except StopIteration as end:
            made: logprobs.EchoedLogprobs = end.value
            return made
