"""Tests patterns of names against `re`, and that none of them takes long."""

from __future__ import annotations

import random
import re

import pytest

from headrace.tensor.adapters.patterns import MAX_CHARS, NamePattern

pytestmark = pytest.mark.pure

NAMES = [f"model.layers.{layer}.{part}" for layer in (0, 7, 12) for part in ("self_attn.q_proj", "mlp.down_proj")] + ["", "q_proj"]
WRITTEN = [
    "", "q_proj", "mlp.down_proj", r".*\.q_proj", r"^model\.layers\.[0-7]\..*",
    r"(?:.*?(?:model|text).*?(?:attn|mlp).*?(?:q_proj|up_proj)).*?",
    r"layers\.(7|1\d)\.(self_attn|mlp)\.\w+$", r"^(?!.*mlp).*proj", r".*(?=q_)q.*",
    r"[^.]*(\.[^.]+){4}", r"(a|b?)*model(\S){3,}\D\W*.*", r"\Amodel.*\Z",
    r"layers.\d{1,2}?\..{2,11}", "(?P<kind>q|down)_proj", "a||q_proj", r"\sx|[\d_a-p]+", "(|m)*(o?){9}.*",
]  # fmt: skip


def expected(pattern: str, name: str) -> tuple[bool, bool]:
    """What PEFT does with target_modules, and with a key of rank_pattern."""
    return re.fullmatch(pattern, name) is not None, re.match(rf"(.*\.)?({pattern})$", name) is not None


@pytest.mark.parametrize("pattern", WRITTEN)
def test_written_patterns_match_as_in_re(pattern: str) -> None:
    ours = NamePattern(pattern)
    for name in NAMES:
        assert (ours.matches(name), ours.matches_end(name)) == expected(pattern, name)


def drawn(generator: random.Random, depth: int) -> str:
    if depth == 0:
        return generator.choice(["a", "b", ".", r"\.", "[ab]", "[^a]", "^", "$", r"\w", ""])
    first, second = drawn(generator, depth - 1), drawn(generator, depth - 1)
    repeat = generator.choice(["", "", "*", "+?", "?", "{2}", "{1,3}"])
    return generator.choice(
        [f"{first}{second}", f"({first}|{second})", f"(?:{first}){repeat}", f"(?={first}){second}", f"(?!{first}){second}"]
    )


def test_drawn_patterns_match_as_in_re() -> None:
    generator = random.Random(0)
    for _ in range(1500):
        pattern = drawn(generator, 3)
        ours = NamePattern(pattern)
        for _ in range(4):
            name = "".join(generator.choices("ab.", k=generator.randrange(7)))
            assert (ours.matches(name), ours.matches_end(name)) == expected(pattern, name), (pattern, name)


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "((a?)*)*b", "(a|a)" * 40 + "b", "(.*)*(.*)*(.*)*b", "a?" * 200 + "a" * 100 + "b", "(|a)" * 60 + "b"]
)
def test_patterns_that_backtracking_never_ends_are_answered(pattern: str) -> None:
    assert not NamePattern(pattern).matches("a" * 60)


@pytest.mark.parametrize(
    "pattern", ["(", r"(a)\1", "(?i)a", "(?i:a)", "(?<=a)b", r"a\b", "(?>a)", "a*+", "((((a*)*)*)*)*", "a" * (MAX_CHARS + 1), "()" * 65]
)
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"known here|not a regular expression|at most"):
        NamePattern(pattern)
