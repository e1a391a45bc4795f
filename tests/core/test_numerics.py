"""Tests when a stream may go on at another replica."""

from __future__ import annotations

import pytest

from headrace.core.numerics import may_resume, numerics_digest, why_not_resume

pytestmark = pytest.mark.pure

FACTS = {"weights": "ab", "dtype": "float32", "versions": "1"}


def test_equal_facts_have_equal_digests_in_any_order() -> None:
    assert numerics_digest(FACTS) == numerics_digest(dict(reversed(FACTS.items()))) != ""
    assert may_resume(numerics_digest(FACTS), numerics_digest(dict(FACTS)))
    assert why_not_resume(FACTS, dict(FACTS)) == ""


def test_any_other_fact_is_named() -> None:
    for name in FACTS:
        other = {**FACTS, name: "other"}
        assert not may_resume(numerics_digest(FACTS), numerics_digest(other))
        assert why_not_resume(FACTS, other) == f"{name}: {FACTS[name]} and other"
    assert why_not_resume(FACTS, {"weights": "ab", "dtype": "float32"}) == "versions: 1 and not said"
    assert numerics_digest({"weights": "a", "b": "c"}) != numerics_digest({"weights": "ab", "": "c"})


def test_what_is_not_known_to_be_equal_is_not_taken_for_equal() -> None:
    unknown = {**FACTS, "weights": ""}
    assert numerics_digest(unknown) == numerics_digest({}) == ""
    assert not may_resume("", "")
    assert why_not_resume(FACTS, unknown) == "the weights of the second replica are not hashed yet"
    assert why_not_resume({}, FACTS) == "the weights of the first replica are not hashed yet"
