"""Tests that core values survive the wire, and that frames that break the format end in one clean error."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import decode_updates

from headrace.core.adapters import MAX_ADAPTERS
from headrace.core.errors import (
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestTooLarge,
    SequenceFailed,
    Unavailable,
    shorten,
)
from headrace.core.grammar import Grammar, GrammarKind, ReasoningSpan
from headrace.core.ids import RequestId
from headrace.core.load import STEP_BOUNDS_S, ClassLoad, EngineCounters, FailureKind, LoadSnapshot
from headrace.core.model_info import KvGroup, ModelInfo
from headrace.core.plan import LogprobColumns, TokenLogprobs
from headrace.core.request import NO_TIER, EngineRequest, PriorityClass, TierTerms
from headrace.core.sampling import SamplingParams
from headrace.core.structured import StructuredOutputsParams
from headrace.core.update import STAGES, FinishReason, MissReason, SequenceUpdate, StageSeconds
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import (
    decode_finish,
    decode_load,
    decode_model_info,
    decode_rejected,
    decode_submit,
    encode_finish,
    encode_load,
    encode_model_info,
    encode_rejected,
    encode_submit,
    encode_updates,
)
from headrace.wire.codec.fields import SameFields
from headrace.wire.codec.request import MAX_REMAINING_MS, set_remaining
from headrace.wire.codec.update import UpdateRows
from headrace.wire.service import Attempt, Handle, MalformedFrame

pytestmark = pytest.mark.pure

tokens = st.integers(0, 2**31 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**32 - 1)

params = st.builds(
    SamplingParams,
    n=st.integers(1, 64),
    temperature=finite,
    top_p=finite,
    top_k=st.integers(-1, 2**31 - 1),
    min_p=finite,
    presence_penalty=finite,
    frequency_penalty=finite,
    repetition_penalty=finite,
    logit_bias=st.dictionaries(tokens, finite, max_size=4),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 2**24),
    min_tokens=st.integers(0, 2**24),
    stop=st.lists(text, max_size=3).map(tuple),
    stop_token_ids=st.lists(tokens, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    detokenize=st.booleans(),
)
spans = st.builds(ReasoningSpan, start=text, end=text, is_open=st.booleans())
grammars = st.builds(Grammar, st.sampled_from(GrammarKind), text, st.none() | spans)
goals = st.none() | finite
tiers = st.builds(TierTerms, name=text, weight=finite, kv_share=goals, ttft_ms=goals, tpot_ms=goals)
requests = st.builds(
    EngineRequest,
    request_id=st.text("abc-123", min_size=1, max_size=20),
    epoch=counts,
    first_index=counts,
    prompt_ids=st.lists(tokens, max_size=8).map(tuple),
    output_ids=st.lists(tokens, max_size=4).map(tuple),
    params=params,
    tenant=text,
    priority=st.sampled_from(PriorityClass),
    tier=st.just(NO_TIER) | tiers,
    salt=st.binary(max_size=8),
    adapter=st.none() | text,
    adapter_digest=text,
    grammar=st.none() | grammars,
    deadline_at=st.none() | st.integers(0, 10**9).map(lambda ms: ms / 1000),
    prefix_caching=st.booleans(),
    numerics_digest=text,
)
positions = st.integers(0, 3).flatmap(
    lambda k: st.builds(
        TokenLogprobs,
        tokens,
        st.floats(allow_nan=False),
        counts,
        st.lists(tokens, min_size=k, max_size=k).map(tuple),
        st.lists(finite, min_size=k, max_size=k).map(tuple),
    )
)


@st.composite
def updates(draw: st.DrawFn) -> SequenceUpdate:
    token_ids = tuple(draw(st.lists(tokens, max_size=4)))
    has_logprobs = draw(st.booleans())
    update = SequenceUpdate(
        request_id=RequestId("r"),
        epoch=3,
        index=draw(st.integers(0, 63)),
        token_ids=token_ids,
        logprobs=tuple(draw(positions) for _ in token_ids) if has_logprobs else (),
        prompt_logprobs=tuple(draw(st.lists(positions, max_size=3))),
        num_cached_tokens=draw(st.none() | counts),
        queue_time_s=draw(st.none() | finite),
    )
    if update.num_cached_tokens is not None:
        update = update._replace(miss_reason=draw(st.none() | st.sampled_from(MissReason)))
    if draw(st.booleans()):
        stages = draw(st.none() | st.builds(StageSeconds, finite, finite, finite, finite, finite))
        return update._replace(
            finish=draw(st.sampled_from(FinishReason)),
            stop_token_id=draw(st.none() | tokens),
            error=draw(st.none() | text),
            stages=stages,
            entered=() if stages is None else tuple(draw(st.lists(st.tuples(st.integers(0, len(STAGES) - 1), finite), max_size=8))),
        )
    return update


@settings(deadline=None, max_examples=50)
@given(requests)
def test_a_request_survives_the_wire(request: EngineRequest) -> None:
    command = encode_submit(request, Handle(7))
    assert command.submit.weight == 1, "engines of an earlier release refuse 0"
    set_remaining(command.submit, request.deadline_at, 0.0)
    command = pb.Command.FromString(command.SerializeToString())
    assert decode_submit(command.submit, 0.0) == request


@pytest.mark.parametrize("now", [0.0, 54321.987654321, 9e6])
@pytest.mark.parametrize(
    ("remaining_s", "expected_ms"),
    [
        (524.287, 524287),
        (0.0, 0),
        (-1.0, 0),
        (2e-9, 1),
        (0.0101, 11),
        (0.0002, 1),
        (1.0, 1000),
        (999_999.999, 999_999_999),
        (1e6 + 0.0005, 1_000_000_001),
        (1e18, MAX_REMAINING_MS),
        (1.7e308, MAX_REMAINING_MS),
        (-1.7e308, 0),
    ],
)
def test_what_remains_of_a_deadline_is_rounded_up_to_whole_milliseconds(now: float, remaining_s: float, expected_ms: int) -> None:
    submit = pb.Submit()
    set_remaining(submit, now + remaining_s, now)
    assert submit.deadline_remaining_ms == expected_ms


@settings(deadline=None, max_examples=30)
@given(st.lists(updates(), max_size=3))
def test_updates_of_one_step_survive_the_wire(batch: list[SequenceUpdate]) -> None:
    rows = [(Handle(number), update) for number, update in enumerate(batch, 1)]
    message = pb.Updates.FromString(encode_updates(rows).SerializeToString())
    decoded = decode_updates(message, lambda handle: Attempt(RequestId("r"), 3))
    for _, update in decoded:
        assert all(isinstance(columns, LogprobColumns) for columns in (update.logprobs, update.prompt_logprobs) if columns)
    objects = [(handle, u._replace(logprobs=tuple(u.logprobs), prompt_logprobs=tuple(u.prompt_logprobs))) for handle, u in decoded]
    assert objects == rows


def test_logprobs_of_a_prompt_that_nobody_wants_are_not_decoded() -> None:
    """24 choices of a prompt of 2,000 tokens bring a million alternatives, of which one choice's are kept."""
    logprobs = tuple(TokenLogprobs(i, -0.5, 1, (1,), (-1.0,)) for i in range(3))
    update = SequenceUpdate(request_id=RequestId("r"), epoch=0, index=0, token_ids=(1,), logprobs=logprobs[:1], prompt_logprobs=logprobs)
    message = encode_updates([(Handle(1), update._replace(index=index)) for index in range(3)])
    wanted = [facts for *_, facts in UpdateRows(message, takes_prompt=lambda handle, index: (handle, index) == (1, 1))]
    assert [facts is not None and "prompt_logprobs" in facts for facts in wanted] == [False, True, False]
    assert all(facts is not None and len(facts["logprobs"]) == 1 for facts in wanted)


def test_rows_of_forgotten_handles_are_skipped_and_the_others_keep_their_tokens() -> None:
    rows = [(Handle(n), SequenceUpdate(request_id=RequestId(f"r{n}"), epoch=0, index=0, token_ids=tuple(range(n)))) for n in range(1, 6)]
    known = {Handle(n): Attempt(RequestId(f"r{n}"), 0) for n in (2, 5)}
    decoded = decode_updates(encode_updates(rows), known.get)
    assert [(handle, update.token_ids) for handle, update in decoded] == [(2, (0, 1)), (5, (0, 1, 2, 3, 4))]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 63), counts, st.sampled_from(FinishReason))
def test_finish_survives_the_wire(index: int, keep: int, reason: FinishReason) -> None:
    assert decode_finish(encode_finish(Handle(9), index, keep, reason).finish) == (9, index, keep, reason)


@settings(deadline=None, max_examples=50)
@given(
    st.builds(
        LoadSnapshot,
        num_running=counts,
        num_waiting=counts,
        kv_blocks_free=counts,
        kv_blocks_cached=counts,
        kv_blocks_used=counts,
        kv_blocks_total=counts,
        step_age_s=st.none() | finite,
        step_predicted_s=finite,
        loop_age_s=finite,
        num_queued_tokens=counts,
        max_num_seqs=counts,
        step_fixed_s=finite,
        step_token_s=finite,
        step_prompt_tokens=counts,
        running_adapters=st.lists(text, max_size=3).map(tuple),
        waiting_adapters=st.lists(text, max_size=3).map(tuple),
        max_loras=counts,
        adapter_pool_bytes=st.none() | counts,
        adapter_pool_highest_bytes=st.none() | counts,
        classes=st.just(()) | st.tuples(*[st.builds(ClassLoad, counts, counts, counts)] * 3),
        counters=st.builds(
            EngineCounters,
            prompt_tokens=counts,
            generation_tokens=counts,
            prefix_cache_hit_tokens=counts,
            prefix_cache_query_tokens=counts,
            preemptions=counts,
            steps=counts,
            step_seconds=finite,
            step_buckets=st.lists(counts, min_size=len(STEP_BOUNDS_S) + 1, max_size=len(STEP_BOUNDS_S) + 1),
            finished=st.dictionaries(st.sampled_from([r.value for r in FinishReason]), counts),
            failures=st.dictionaries(st.sampled_from([kind.value for kind in FailureKind]), counts),
        ),
    )
)
def test_a_load_snapshot_survives_the_wire(load: LoadSnapshot) -> None:
    assert decode_load(pb.Load.FromString(encode_load(load).SerializeToString())) == load


def test_a_load_without_what_may_be_missing_reads_as_not_known() -> None:
    earlier = pb.Load(num_running=2, counters=pb.Counters(step_buckets=[0] * (len(STEP_BOUNDS_S) + 1)))
    load = decode_load(pb.Load.FromString(earlier.SerializeToString()))
    assert (load.num_running, load.num_queued_tokens, load.max_num_seqs, load.step_fixed_s, load.step_token_s) == (2, 0, 0, 0.0, 0.0)


def test_a_load_of_other_classes_than_ours_is_malformed() -> None:
    other = pb.Load(classes=[pb.ClassLoad()] * 2, counters=pb.Counters(step_buckets=[0] * (len(STEP_BOUNDS_S) + 1)))
    with pytest.raises(MalformedFrame, match="2 classes, not 3"):
        decode_load(other)


def test_model_facts_survive_the_wire_with_the_types_of_their_defaults() -> None:
    info = ModelInfo(
        architecture="LlamaForCausalLM",
        vocab_size=2048,
        max_model_len=512,
        eos_token_ids=(1, 2),
        kv_groups=(
            KvGroup(layers=(0, 2), kv_heads=2, head_dim=32, dtype_bytes=2),
            KvGroup(layers=(1,), kv_heads=2, head_dim=32, dtype_bytes=2, window=128, scale_bytes=4),
        ),
        block_size=16,
        num_blocks=(100, 50),
        dtype="bfloat16",
        weight_bytes=10**10,
        sampling_defaults={"temperature": 0.7, "top_k": 40, "do_sample": True, "note": "x"},
        digests={"model": "ab", "tokenizer": "cd"},
        decided=("threads: 2",),
        adapters={"acme/sql": "ab" * 32, "b": "cd"},
        queue_policy="fair",
    )
    decoded = decode_model_info(pb.ModelFacts.FromString(encode_model_info(info).SerializeToString()))
    assert decoded == info
    kinds = {key: type(value) for key, value in decoded.sampling_defaults.items()}
    assert kinds == {"temperature": float, "top_k": int, "do_sample": bool, "note": str}


@pytest.mark.parametrize(
    ("adapters", "why"),
    [
        ({"a b": "ab"}, "'a b' is not a model name"),
        ({"../x": "ab"}, "is not a model name"),
        ({"a": ""}, "its digest is not hex"),
        ({"a": "AB"}, "its digest is not hex"),
        ({"a": "abc"}, "its digest is not hex"),
        ({"a": "ab" * 65}, "its digest is not hex"),
        ({f"a{number}": "ab" for number in range(MAX_ADAPTERS + 1)}, "adapters: 4097, more than 4096"),
    ],
)
def test_adapters_of_another_form_or_too_many_are_malformed(adapters: dict[str, str], why: str) -> None:
    facts = pb.ModelFacts(vocab_size=1, max_model_len=1, block_size=1, adapters=adapters)
    with pytest.raises(MalformedFrame, match=why):
        decode_model_info(facts)


@dataclass(frozen=True)
class SteppedTier(TierTerms):
    added: int = 0


def test_a_field_that_one_side_alone_has_is_never_left_out_silently() -> None:
    with pytest.raises(TypeError, match="SteppedTier and its message differ in added"):
        SameFields(SteppedTier, pb.TierTerms)
    with pytest.raises(TypeError, match="ReasoningSpan and its message differ in kind, reasoning, source"):
        SameFields(ReasoningSpan, pb.Grammar, but=("start", "end", "is_open"))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("top_p", "0 < top_p <= 1", 7.5, "Use 1."),
        InvalidRequest("seed", "drawn before submission", None),
        InvalidRequest("stop", "non-empty strings", "it's"),
        RequestTooLarge("prompt", "at most 10 tokens", 11, "Shorten it."),
        ModelNotFound("gpt", ["a", "b"]),
        Overloaded("the queue is full", retry_after_s=2.5),
        Unavailable("draining", retry_after_s=0.5),
        SequenceFailed("broken"),
    ],
)
def test_a_rejection_arrives_as_it_was_raised(error: HeadraceError) -> None:
    handle, decoded = decode_rejected(pb.Rejected.FromString(encode_rejected(Handle(4), error).SerializeToString()))
    assert handle == 4
    assert type(decoded) is type(error)
    assert str(decoded) == str(error)
    facts, expected = dict(vars(decoded)), dict(vars(error))
    given = expected.pop("given", None)
    assert facts.pop("given", None) == (None if given is None else shorten(given))  # only its text travels
    assert facts == expected


def test_a_foreign_error_crosses_without_its_text() -> None:
    _, decoded = decode_rejected(encode_rejected(Handle(1), ZeroDivisionError("/secret/path")))
    assert isinstance(decoded, SequenceFailed)
    assert "secret" not in str(decoded)


def test_what_the_wire_cannot_carry_is_refused_before_it_is_sent() -> None:
    for broken in (
        EngineRequest(request_id=RequestId("r"), prompt_ids=(-1,), params=SamplingParams(seed=1)),
        EngineRequest(request_id=RequestId("r"), prompt_ids=(1,), params=SamplingParams(seed=1, stop=("\ud800",))),
        EngineRequest(request_id=RequestId("r"), prompt_ids=(1,), params=SamplingParams(seed=2**64)),
        EngineRequest(
            request_id=RequestId("r"),
            prompt_ids=(1,),
            params=SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(regex="a")),
        ),
        EngineRequest(request_id=RequestId("r"), prompt_ids=(1,), params=SamplingParams(seed=1), deadline_at=float("nan")),
    ):
        with pytest.raises(InvalidRequest):
            encode_submit(broken, Handle(1))


def test_a_deadline_is_measured_by_each_ends_own_clock() -> None:
    submit = encode_submit(EngineRequest(request_id=RequestId("r"), prompt_ids=(1,), params=SamplingParams(seed=1)), Handle(1)).submit
    set_remaining(submit, 1000.5, 998.0)
    assert decode_submit(submit, 7.0).deadline_at == 9.5


def _valid_updates() -> pb.Updates:
    position = TokenLogprobs(5, -0.5, 1, (5, 6), (-0.5, -1.5))
    update = SequenceUpdate(
        request_id=RequestId("r"),
        epoch=0,
        index=0,
        token_ids=(5,),
        logprobs=(position,),
        prompt_logprobs=(position,),
        finish=FinishReason.STOP,
        num_cached_tokens=3,
        queue_time_s=0.1,
    )
    return encode_updates([(Handle(1), update)])


def test_a_reason_of_a_newer_engine_reads_as_none() -> None:
    message = _valid_updates()
    message.first[0].miss_reason = 99  # type: ignore[assignment]
    ((_, update),) = decode_updates(message, lambda _: Attempt(RequestId("r"), 0))
    assert (update.num_cached_tokens, update.miss_reason) == (3, None)


def _break_indices(m: pb.Updates) -> None:
    m.indices.append(0)


def _break_counts(m: pb.Updates) -> None:
    m.token_counts[0] = 9


def _break_row(m: pb.Updates) -> None:
    m.finished[0].row = 1


def _break_twice(m: pb.Updates) -> None:
    m.first.append(m.first[0])


def _break_reason(m: pb.Updates) -> None:
    m.finished[0].reason = 99  # type: ignore[assignment]


def _break_logprobs(m: pb.Updates) -> None:
    m.logprobs[0].values.ranks.append(1)


def _break_top(m: pb.Updates) -> None:
    m.prompt_logprobs[0].values.top_counts[0] = 1


def _break_top_id(m: pb.Updates) -> None:
    m.logprobs[0].values.top_ids[0] = 2**31


def _break_logprob_count(m: pb.Updates) -> None:
    m.token_ids.append(3)
    m.token_counts[0] = 2


@pytest.mark.parametrize(
    "damage",
    [
        _break_indices,
        _break_counts,
        _break_row,
        _break_twice,
        _break_reason,
        _break_logprobs,
        _break_top,
        _break_top_id,
        _break_logprob_count,
    ],
)
def test_updates_that_break_the_format_are_refused(damage: object) -> None:
    message = _valid_updates()
    assert decode_updates(message, lambda handle: Attempt(RequestId("r"), 0))
    damage(message)  # type: ignore[operator]
    with pytest.raises(MalformedFrame):
        decode_updates(message, lambda handle: Attempt(RequestId("r"), 0))


def test_submits_that_break_the_format_are_refused() -> None:
    request = EngineRequest(request_id=RequestId("r"), prompt_ids=(1,), params=SamplingParams(seed=1))
    good = encode_submit(request, Handle(1)).submit
    for change in ({"handle": 0}, {"request_id": ""}, {"request_id": "x" * 129}, {"priority": 99}):
        message = pb.Submit.FromString(good.SerializeToString())
        for name, value in change.items():
            setattr(message, name, value)
        with pytest.raises(MalformedFrame):
            decode_submit(message, 0.0)
    good.params.logit_bias_ids.append(3)
    with pytest.raises(MalformedFrame):
        decode_submit(good, 0.0)
    good.ClearField("params")
    with pytest.raises(MalformedFrame):
        decode_submit(good, 0.0)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_mutated_frames_never_raise_anything_else(seed: int, num_changes: int) -> None:
    """Bits flipped, bytes cut out or put in: either it is a valid frame, or protobuf or the codec says no."""
    chance = random.Random(seed)
    request = EngineRequest(request_id=RequestId("r"), prompt_ids=(1, 2), params=SamplingParams(seed=1, logit_bias={3: 1.0}), adapter="a")
    frame = pb.EngineFrame(updates=_valid_updates(), rejected=[encode_rejected(Handle(1), InvalidRequest("a", "b", "c"))])
    commands = pb.ClientFrame(commands=[encode_submit(request, Handle(1)), encode_finish(Handle(1), 0, 3, FinishReason.STOP)])
    data = bytearray(chance.choice((frame, commands)).SerializeToString())
    for _ in range(num_changes):
        at = chance.randrange(len(data)) if data else 0
        match chance.randrange(3):
            case 0 if data:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at : at + chance.randrange(4)]
            case _:
                data[at:at] = chance.randbytes(2)
    try:
        for part in pb.ClientFrame.FromString(bytes(data)).commands:
            if part.HasField("submit"):
                decode_submit(part.submit, 0.0)
            if part.HasField("finish"):
                decode_finish(part.finish)
    except (MalformedFrame, DecodeError, InvalidRequest):
        pass
    try:
        engine_frame = pb.EngineFrame.FromString(bytes(data))
        decode_updates(engine_frame.updates, lambda handle: Attempt(RequestId("r"), 0))
        for rejected in engine_frame.rejected:
            decode_rejected(rejected)
        if engine_frame.HasField("load"):
            decode_load(engine_frame.load)
        if engine_frame.HasField("hello"):
            decode_model_info(engine_frame.hello.model)
    except (MalformedFrame, DecodeError):
        pass
