"""Tests how engine updates become what a client sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import text_kit
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.ids import RequestId
from headrace.core.plan import TokenLogprobs, columns_of
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.text.assemble import EngineFinish, OutputAssembler, OutputDelta, decoded_prompt_logprobs
from headrace.text.detokenize import Detokenizer
from headrace.text.logprobs import DecodedLogprobs, TokenEntry, TopToken
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.pure


def update(token_ids: Sequence[int] = (), **changes: Any) -> SequenceUpdate:
    return SequenceUpdate(request_id=RequestId("r"), epoch=0, index=0, token_ids=tuple(token_ids), **changes)


def logprobs_of(token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(i, -0.5, 1, (i, 0), (-0.5, -1.5)) for i in token_ids)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = [tokenizer.token_to_id(char) for char in text]
    return [i for i in ids if i is not None]


def joined(parts: Sequence[DecodedLogprobs]) -> DecodedLogprobs | None:
    for part in parts[1:]:
        parts[0].extend(part)
    return parts[0] if parts else None


def entries_of(delta: OutputDelta) -> list[TokenEntry]:
    return list(delta.logprobs or ())


def feed_all(assembler: OutputAssembler, updates: Sequence[SequenceUpdate]) -> OutputDelta:
    """All deltas as one."""
    deltas = [assembler.feed(each) for each in updates]
    return OutputDelta(
        text="".join(d.text for d in deltas),
        token_ids=tuple(i for d in deltas for i in d.token_ids),
        logprobs=joined([d.logprobs for d in deltas if d.logprobs is not None]),
        finish=next((d.finish for d in deltas if d.finish), None),
        stop_reason=next((d.stop_reason for d in deltas if d.stop_reason is not None), None),
        engine_finish=next((d.engine_finish for d in deltas if d.engine_finish), None),
    )


def test_an_end_token_is_counted_but_has_no_text(byte_level: Tokenizer) -> None:
    end = text_kit.eos_token_id(byte_level)
    assembler = OutputAssembler(byte_level, SamplingParams(skip_special_tokens=False))
    ids = [*letters(byte_level, "ab"), end]
    delta = assembler.feed(update(ids, finish=FinishReason.STOP, stop_token_id=end, logprobs=logprobs_of(ids)))
    assert (delta.text, delta.token_ids, delta.finish, delta.stop_reason) == ("ab", tuple(ids), FinishReason.STOP, None)
    assert [e.is_visible for e in entries_of(delta)] == [True, True, False]
    assert assembler.num_tokens == 3
    assert delta.engine_finish is None


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_id_is_named_as_the_reason(byte_level: Tokenizer, include: bool, text: str) -> None:
    ids = letters(byte_level, "ab")
    params = SamplingParams(stop_token_ids=(ids[1],), include_stop_str_in_output=include)
    delta = OutputAssembler(byte_level, params).feed(update(ids, finish=FinishReason.STOP, stop_token_id=ids[1]))
    assert (delta.text, delta.stop_reason) == (text, ids[1])


def test_a_stop_string_ends_the_output_and_the_engine_must_be_told(byte_level: Tokenizer) -> None:
    assembler = OutputAssembler(byte_level, SamplingParams(stop=("ab",)))
    first = assembler.feed(update(letters(byte_level, "xa")))
    assert (first.text, len(first.token_ids)) == ("x", 1)
    second = assembler.feed(update(letters(byte_level, "byz")))
    assert (second.text, second.finish, second.stop_reason) == ("", FinishReason.STOP, "ab")
    assert second.token_ids == tuple(letters(byte_level, "ab"))
    assert second.engine_finish == EngineFinish(3, FinishReason.STOP)
    assert assembler.num_tokens == 3
    late = assembler.feed(update(letters(byte_level, "zz"), finish=FinishReason.STOP))
    assert late.is_empty
    assert late.finish is None
    assert assembler.num_tokens == 3


def test_an_engine_that_ended_by_itself_is_not_told(byte_level: Tokenizer) -> None:
    assembler = OutputAssembler(byte_level, SamplingParams(stop=("ab",)))
    delta = assembler.feed(update(letters(byte_level, "xabz"), finish=FinishReason.LENGTH))
    assert (delta.text, delta.finish, delta.engine_finish) == ("x", FinishReason.STOP, None)


def test_held_text_comes_out_at_the_end(byte_level: Tokenizer) -> None:
    assembler = OutputAssembler(byte_level, SamplingParams(stop=("abc",)))
    assert assembler.feed(update(letters(byte_level, "ab"))).is_empty
    delta = assembler.feed(update((), finish=FinishReason.LENGTH))
    assert (delta.text, len(delta.token_ids), delta.finish) == ("ab", 2, FinishReason.LENGTH)


def test_an_end_token_gives_out_what_a_stop_string_held_back(byte_level: Tokenizer) -> None:
    assembler = OutputAssembler(byte_level, SamplingParams(stop=("abc",)))
    end = text_kit.eos_token_id(byte_level)
    delta = assembler.feed(update([*letters(byte_level, "ab"), end], finish=FinishReason.STOP, stop_token_id=end))
    assert (delta.text, delta.stop_reason) == ("ab", None)


def test_a_stop_string_made_of_the_last_unfinished_character_is_found(byte_level: Tokenizer) -> None:
    first_byte = byte_level.token_to_id("\u00e6")
    assert first_byte is not None
    assembler = OutputAssembler(byte_level, SamplingParams(stop=("\ufffd",)))
    assert assembler.feed(update([first_byte])).is_empty
    delta = assembler.feed(update((), finish=FinishReason.LENGTH))
    assert (delta.text, delta.finish, delta.stop_reason) == ("", FinishReason.STOP, "\ufffd")


def test_logprob_entries_carry_text_bytes_and_offsets(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a \u65e5b", add_special_tokens=False)
    delta = OutputAssembler(byte_level, SamplingParams(logprobs=1)).feed(update(ids, logprobs=logprobs_of(ids), finish=FinishReason.LENGTH))
    assert b"".join(e.raw for e in entries_of(delta)) == "a \u65e5b".encode()
    assert [e.token_id for e in entries_of(delta)] == ids
    assert entries_of(delta)[-1].text_offset == 3
    assert entries_of(delta)[0].top[0].logprob == -0.5
    assert [t.token_id for t in entries_of(delta)[0].top] == [ids[0], 0]


def test_tokens_within_a_cut_stop_string_are_marked_invisible(byte_level: Tokenizer) -> None:
    ids = letters(byte_level, "xab")
    delta = OutputAssembler(byte_level, SamplingParams(stop=("ab",), logprobs=0)).feed(update(ids, logprobs=logprobs_of(ids)))
    assert [e.is_visible for e in entries_of(delta)] == [True, False, False]
    kept = OutputAssembler(byte_level, SamplingParams(stop=("ab",), logprobs=0, include_stop_str_in_output=True))
    assert all(e.is_visible for e in entries_of(kept.feed(update(ids, logprobs=logprobs_of(ids)))))


@given(
    text=st.text("abx\u65e5", max_size=15), cuts=st.lists(st.integers(1, 3), max_size=20), stop=st.sampled_from(["ab", "b\u65e5x", "zz"])
)
@settings(max_examples=150, deadline=None)
def test_tokens_and_text_travel_together(byte_level: Tokenizer, text: str, cuts: list[int], stop: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    assembler = OutputAssembler(byte_level, SamplingParams(stop=(stop,), logprobs=1))
    updates, rest = [], list(ids)
    for size in cuts:
        chunk, rest = rest[:size], rest[size:]
        updates.append(update(chunk, logprobs=logprobs_of(chunk)))
    updates.append(update(rest, logprobs=logprobs_of(rest), finish=FinishReason.LENGTH))
    shown = ""
    tokens: list[int] = []
    for each in updates:
        delta = assembler.feed(each)
        shown += delta.text
        tokens += delta.token_ids
        assert len(entries_of(delta)) == len(delta.token_ids)
        if assembler.finish is None:
            # No token is out before all its text is.
            assert shown.encode().startswith(byte_level.join(tokens))
    assert shown == text.split(stop)[0]
    assert tokens == ids[: assembler.num_tokens]
    assert assembler.finish is not None


def objects_of(tokenizer: Tokenizer, updates: Sequence[SequenceUpdate], params: SamplingParams) -> list[TokenEntry]:
    """The reference implementation: an object per token, and per alternative, of an answer without a stop string."""
    reader = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
    found: list[TokenEntry] = []
    for each in updates:
        for number, (token_id, at) in enumerate(zip(each.token_ids, each.logprobs, strict=True)):
            is_visible = each.stop_token_id is None or number + 1 < len(each.token_ids)
            top = [
                TopToken(i, tokenizer.token_text(i), tokenizer.token_bytes(i), logprob)
                for i, logprob in zip(at.top_ids, at.top_logprobs, strict=True)
            ]
            text, raw = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
            found.append(TokenEntry(token_id, text, raw, at.logprob, at.rank, tuple(top), reader.num_chars, is_visible))
            if is_visible:
                reader.push((token_id,))
    return found


@given(text=st.text("abx\u65e5", max_size=15), cuts=st.lists(st.integers(1, 3), max_size=20), ends=st.booleans(), is_columns=st.booleans())
@settings(max_examples=100, deadline=None)
def test_columns_are_the_objects_they_replace(byte_level: Tokenizer, text: str, cuts: list[int], ends: bool, is_columns: bool) -> None:
    params = SamplingParams(logprobs=1)
    given_as = columns_of if is_columns else tuple
    rest = byte_level.encode(text, add_special_tokens=False)
    updates: list[SequenceUpdate] = []
    for size in cuts:
        chunk, rest = rest[:size], rest[size:]
        updates.append(update(chunk, logprobs=given_as(logprobs_of(chunk))))
    end = text_kit.eos_token_id(byte_level) if ends else None
    last = [*rest, *([] if end is None else [end])]
    finish = FinishReason.LENGTH if end is None else FinishReason.STOP
    updates.append(update(last, logprobs=given_as(logprobs_of(last)), finish=finish, stop_token_id=end))
    assembler = OutputAssembler(byte_level, params)
    assert [entry for each in updates for entry in entries_of(assembler.feed(each))] == objects_of(byte_level, updates, params)


def test_without_detokenizing_tokens_pass_straight_through(byte_level: Tokenizer) -> None:
    assembler = OutputAssembler(byte_level, SamplingParams(detokenize=False))
    ids = letters(byte_level, "ab")
    assert feed_all(assembler, [update(ids[:1]), update(ids[1:], finish=FinishReason.LENGTH)]) == OutputDelta(
        token_ids=tuple(ids), finish=FinishReason.LENGTH
    )


def test_min_tokens_reaches_the_stop_strings(byte_level: Tokenizer) -> None:
    assembler = OutputAssembler(byte_level, SamplingParams(stop=("a",), min_tokens=2))
    got = feed_all(assembler, [update([i]) for i in letters(byte_level, "axa")])
    assert (got.text, got.stop_reason) == ("ax", "a")


def test_failures_cached_tokens_and_queue_time_are_passed_on(byte_level: Tokenizer) -> None:
    assembler = OutputAssembler(byte_level, SamplingParams())
    assembler.feed(update(letters(byte_level, "a"), num_cached_tokens=32, queue_time_s=0.25))
    delta = assembler.feed(update((), finish=FinishReason.ERROR, error="broken"))
    assert (delta.finish, delta.error) == (FinishReason.ERROR, "broken")
    assert (assembler.num_cached_tokens, assembler.queue_time_s) == (32, 0.25)


def test_prompt_entries_start_at_the_second_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("x \u65e5y", add_special_tokens=True)
    entries = list(decoded_prompt_logprobs(byte_level, ids, logprobs_of(ids[1:])))
    assert [e.token_id for e in entries] == ids[1:]
    assert entries[0].text_offset == len("<|begin|>")
    assert entries[-1].text_offset == len("<|begin|>x \u65e5")


@given(
    st.lists(st.lists(st.integers(0, 344), min_size=1, max_size=3), max_size=30),
    st.lists(st.text("aeht \u00e9", min_size=1, max_size=3), max_size=2),
    st.integers(0, 4),
    st.booleans(),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_whole_tokens_taken_without_objects_give_what_feeding_gives(
    byte_level: Tokenizer, batches: list[list[int]], stops: list[str], min_tokens: int, skip: bool, data: st.DataObject
) -> None:
    """Update by update: text, released tokens, counts and the end are the same, whichever updates are tried the short way."""
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, skip_special_tokens=skip)
    plain, short = OutputAssembler(byte_level, params), OutputAssembler(byte_level, params)
    for ids in batches:
        expected = plain.feed(update(ids))
        text = short.feed_whole(ids) if data.draw(st.booleans()) else None
        found = short.feed(update(ids)) if text is None else OutputDelta(text=text, token_ids=tuple(ids))
        assert found == expected
        assert (short.num_tokens, short.finish) == (plain.num_tokens, plain.finish)
    assert short.feed(update(finish=FinishReason.LENGTH)) == plain.feed(update(finish=FinishReason.LENGTH))


def test_ordinary_text_is_taken_the_short_way_and_what_must_wait_is_not(byte_level: Tokenizer) -> None:
    assembler = OutputAssembler(byte_level, SamplingParams(stop=("stop",)))
    assert assembler.feed_whole(letters(byte_level, "ab")) == "ab"
    assert assembler.feed_whole(letters(byte_level, "as")) is None
    assert assembler.num_tokens == 2
    assert assembler.feed(update(letters(byte_level, "as"))).text == "a"
    assert assembler.feed_whole(letters(byte_level, "x")) is None, "the held s comes first"
    assert assembler.feed(update(letters(byte_level, "x"))).text == "sx"
    half = byte_level.encode("\u00ef", add_special_tokens=False)
    first = byte_level.token_bytes(half[0])
    assert len(first) == 1
    assert assembler.feed_whole(half[:1]) is None
    assert assembler.feed_whole([text_kit.eos_token_id(byte_level)]) is None


def test_without_detokenizing_nothing_is_taken_the_short_way(byte_level: Tokenizer) -> None:
    assert OutputAssembler(byte_level, SamplingParams(detokenize=False)).feed_whole(letters(byte_level, "a")) is None
