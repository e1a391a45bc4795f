"""Tests hashes, rules of parameters, and the codec of plans."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest, shorten
from headrace.core.grammar import Grammar, GrammarKind, ReasoningSpan
from headrace.core.hashing import block_hash, chain_root
from headrace.core.ids import SlotId
from headrace.core.plan import MoveKind, Plan, Started, StepCosts
from headrace.core.plan_codec import COLUMNS, MOVE_COLUMNS, PlanCodecError, decode_plan, dump_plans, encode_plan, load_plans
from headrace.core.sampling import SamplingParams, params_from_mapping

pytestmark = pytest.mark.pure


def test_block_hashes_are_the_same_in_every_process() -> None:
    """And in every version: replicas that are upgraded one after the other share what they hold."""
    root = chain_root(b"k", model_digest=b"m", kv_dtype="int8", salt=b"s")
    assert block_hash(root, [1, 2, 3]).hex() == "35023e5baa918e2946374f871407d7fa"


def test_everything_that_should_separate_blocks_does() -> None:
    plain: dict[str, Any] = {"model_digest": b"m", "kv_dtype": "bfloat16"}
    roots = [
        chain_root(b"k", **plain),
        chain_root(b"j", **plain),
        chain_root(b"k", **plain, salt=b"a"),
        chain_root(b"k", **plain, adapter_digest=b"a"),
        chain_root(b"k", **plain, salt=b"a", adapter_digest=b"a"),
        chain_root(b"k", model_digest=b"n", kv_dtype="bfloat16"),
        chain_root(b"k", model_digest=b"m", kv_dtype="int8"),
        chain_root(b"k", model_digest=b"mb", kv_dtype="float16"),
    ]
    hashes = [block_hash(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1, 2, 0])]
    hashes += [block_hash(roots[0], [1, 2], [b"image"]), block_hash(hashes[0], [1, 2])]
    assert len(set(hashes)) == len(hashes)
    assert {len(h) for h in hashes} == {16}
    assert block_hash(roots[0], array("i", [1, 2])) == block_hash(roots[0], (1, 2))


BROKEN = [
    ("n", 0), ("n", 65), ("n", True), ("n", 1.0), ("n", 10**18),
    ("temperature", -0.1), ("temperature", 2.01), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("top_p", -0.1), ("top_p", 1.1), ("top_p", math.nan), ("top_k", -2), ("top_k", 1.5), ("top_k", 2**31),
    ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", math.nan),
    ("repetition_penalty", 0.0), ("repetition_penalty", 11), ("seed", 2**63), ("seed", "1"), ("seed", 1.5),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**18), ("max_tokens", True), ("min_tokens", -1), ("min_tokens", 17),
    ("logprobs", 21), ("logprobs", -1), ("prompt_logprobs", 21), ("stop", ("",)), ("stop", ("a",) * 17), ("stop", ("x" * 1025,)),
    ("stop", (1,)), ("stop_token_ids", (-1,)), ("stop_token_ids", (100,)), ("stop_token_ids", (1,) * 65), ("stop_token_ids", ("1",)),
    ("logit_bias", {1: 101.0}), ("logit_bias", {1: math.nan}), ("logit_bias", {100: 1.0}), ("logit_bias", {-1: 1.0}),
    ("logit_bias", dict.fromkeys(range(1025), 0.0)), ("logit_bias", [1]), ("ignore_eos", 1), ("skip_special_tokens", None),
    ("temperature", True), ("presence_penalty", False), ("min_tokens", False), ("logit_bias", []),
    ("ignore_eos", 0), ("detokenize", 1),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BROKEN, ids=[f"{f}={shorten(v, 20)}" for f, v in BROKEN])
def test_a_broken_rule_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value}).checked(vocab_size=100)
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


def test_limits_are_inclusive() -> None:
    SamplingParams(
        n=64, temperature=2, top_p=1, top_k=-1, min_p=1, seed=-(2**63), max_tokens=2**24, logprobs=20, stop=("x" * 1024,)
    ).checked()
    SamplingParams(logit_bias={99: 100, 0: -100}, stop_token_ids=(99,), min_tokens=16).checked(vocab_size=100)


def test_unknown_parameters_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="temprature"):
        params_from_mapping({"temprature": 1})
    assert params_from_mapping({"top_k": 3}, defaults=SamplingParams(temperature=0.5)) == SamplingParams(top_k=3, temperature=0.5)


def test_long_values_are_shortened_in_messages() -> None:
    assert len(shorten("x" * 10**6)) <= 80
    assert shorten(10**5000) == "an integer of 16610 bits"
    assert "\\ud800" in shorten("\ud800")
    assert len(shorten({str(number): number for number in range(10**5)})) <= 80


@pytest.mark.parametrize(
    ("value", "shown"),
    [("a'b", '"a\'b"'), ({"a": [True, None]}, '{"a": [true, null]}'), ((1, 2.5), "[1, 2.5]"), ({(1,): 2}, "{(1,): 2}")],
)
def test_values_are_shown_as_a_client_writes_them(value: object, shown: str) -> None:
    assert shorten(value) == shown


def test_stop_accepts_one_string_or_a_list() -> None:
    assert SamplingParams(stop="a").stop == ("a",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


columns = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6).map(lambda values: array("i", values))
params = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 2),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 50), st.floats(-5, 5), max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
)
spans = st.builds(ReasoningSpan, start=st.text(max_size=3), end=st.text(max_size=3), is_open=st.booleans())
grammars = st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text(max_size=9), st.none() | spans)
started = st.builds(Started, st.integers(0, 99).map(SlotId), columns, st.integers(0, 9), params, st.integers(0, 3), grammars)
seconds = st.floats(0, 10)
moves = st.lists(st.tuples(st.sampled_from(MoveKind), *[st.integers(0, 2**31 - 1)] * 4), max_size=4)


@st.composite
def drawn_plans(draw: st.DrawFn) -> Plan:
    """Any columns; those of moves are of one length, their kinds are known."""
    given = {name: draw(columns) for name in COLUMNS if name not in MOVE_COLUMNS}
    drawn = draw(moves)
    given |= {name: array("i", [move[i] for move in drawn]) for i, name in enumerate(MOVE_COLUMNS)}
    costs = StepCosts(*draw(st.tuples(seconds, seconds)))
    return Plan(step_id=draw(st.integers(0, 2**40)), costs=costs, started=tuple(draw(st.lists(started, max_size=2))), **given)


plans = drawn_plans()


@given(st.lists(plans, max_size=3))
@settings(max_examples=60, deadline=None)
def test_plans_survive_the_codec(given_plans: list[Plan]) -> None:
    assert load_plans(dump_plans(given_plans)) == given_plans


@given(plan=plans, data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_plans_are_refused_cleanly(plan: Plan, data: st.DataObject) -> None:
    good = encode_plan(plan)
    position = data.draw(st.integers(0, len(good) - 1))
    damaged = bytearray(good)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.sampled_from([bytes(damaged), good[:position], good + b"x"]))
    try:
        decode_plan(cut)
    except PlanCodecError:
        return
    assert len(cut) == len(good), "lengths are always checked"


@pytest.mark.parametrize("kind", [-1, max(MoveKind) + 1])
def test_a_plan_with_an_unknown_kind_of_move_is_refused(kind: int) -> None:
    one = array("i", [1])
    plan = Plan(step_id=1, move_kinds=array("i", [kind]), move_ids=one, move_groups=one, move_sources=one, move_targets=one)
    with pytest.raises(PlanCodecError, match=f"unknown kinds of moves: \\[{kind}\\]"):
        decode_plan(encode_plan(plan))


def test_a_plan_whose_moves_lack_a_column_is_refused() -> None:
    """Such a plan was written before moves had ids: what it names could not be reported done."""
    one = array("i", [1])
    with pytest.raises(PlanCodecError, match="differ in length"):
        decode_plan(encode_plan(Plan(step_id=1, move_kinds=one, move_groups=one, move_sources=one, move_targets=one)))


def test_a_file_that_is_no_dump_is_refused() -> None:
    for data in (b"", b"HRPLAN1", b"\x80\x04pickle", dump_plans([Plan(step_id=1)])[:-1]):
        with pytest.raises(PlanCodecError):
            load_plans(data)
