"""Tests patterns of linears: they match what `re` matches, in a bounded number of steps."""

from __future__ import annotations

import random
import re

import pytest

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.formats.patterns import MAX_PATTERNS, MAX_STEPS, Name, read_patterns

pytestmark = pytest.mark.pure

ATOMS = ("a", "b", r"\.", r"\d", ".", "[ab]", "[^a]", r"\w", "[a-b1]", "_", "-", r"[\].]")
REPEATS = ("*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "??", "{1,3}?")


def draw_pattern(draw: random.Random, depth: int) -> str:
    if depth == 0:
        return draw.choice(ATOMS)
    one, other = draw_pattern(draw, depth - 1), draw_pattern(draw, depth - 1)
    kinds = (
        draw.choice(ATOMS), one + other, f"({one}|{other})", f"(?:{one}|{other})", f"({one}){draw.choice(REPEATS)}",
        f"{draw.choice(('^', '$', chr(92) + 'b'))}{one}", f"(?{draw.choice('!=')}{one})",
    )  # fmt: skip
    return draw.choice(kinds)


def matches(pattern: str, name: str) -> bool:
    return read_patterns("config.json", [pattern])[pattern].matches(Name(name))


def test_random_patterns_match_what_re_matches() -> None:
    draw, number = random.Random(0), 0
    for _ in range(2000):
        pattern = draw_pattern(draw, 4)
        for _ in range(4):
            name = "".join(draw.choices("ab1._-", k=draw.randint(0, 6)))
            found = matches(pattern, name)
            assert found == bool(re.match(pattern, name)), (pattern, name)
            number += found
    assert 1000 < number < 7000


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (r".*\.18\..*gate.*", False),
        (r"model\.layers\.(?!0\b).*", True),
        (r".*self_attn\.(q|k|v|o)_proj$", True),
        (r".*\.(?:[0-9]|1[0-5])\.", False),
        ("lm_head", False),
        ("", True),
    ],
)
def test_patterns_of_real_files(pattern: str, wanted: bool) -> None:
    assert matches(pattern, "model.layers.31.self_attn.q_proj") is wanted


@pytest.mark.parametrize(
    "pattern", ["(.|.)" * 30 + "Q", "(a*)*b", "((a+)+)+$x", "(?:(?:a?){1000}){1000}z", "((((.*)*)*)*)*Q", "(?=(?=(.*)*x)*.*y)"]
)
def test_patterns_that_re_would_never_finish_take_few_steps(pattern: str) -> None:
    name = Name("a" * 64)
    assert not read_patterns("config.json", [pattern])[pattern].matches(name)
    assert name.steps > MAX_STEPS * 3 // 4


def test_all_patterns_share_the_steps_of_a_name() -> None:
    name, patterns = Name("a" * 64), read_patterns("config.json", [f"(.+){{{number}}}x" for number in range(2, 300)])
    with pytest.raises(CheckpointError, match=r'config.json: the pattern "\(\.\+\).*" and those before it take more than 65536 steps'):
        any(pattern.matches(name) for pattern in patterns.values())


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "is no regular expression"),
        ("a{3,1}", "is no regular expression"),
        (r"(a)\1", r"has '\\\\1', which is not supported"),
        ("(?<=a)b", r"has '\(\?<=', which is not supported"),
        ("(?P<x>a)", r"has '\(\?P<', which is not supported"),
        ("a++", r"has '\+\+', which is not supported"),
        ("[[:alpha:]]", r"has '\[\[', which is not supported"),
        ("a{5000}", "repeats more than 1000 times"),
        ("a" * 1025, "has more than 1024 characters"),
        ("(" * 40 + ")" * 40, "nests more than 32 groups"),
    ],
)
def test_patterns_that_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: the pattern .* {reason}"):
        matches(pattern, "a")


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(CheckpointError, match="more than 2048 patterns name linears"):
        read_patterns("config.json", map(str, range(MAX_PATTERNS + 1)))
