"""Tests the version of a loaded model, under which its answers are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.model_info import ModelInfo, may_resume, numerics_digest, why_not_resume

pytestmark = pytest.mark.pure

INFO = ModelInfo(
    architecture="LlamaForCausalLM", vocab_size=8, max_model_len=8, eos_token_ids=(2,), kv_groups=(), block_size=1, num_blocks=(),
    dtype="float32", weight_bytes=1, digests={"model": "ab"}, numerics={"dtype": "float32"},
)  # fmt: skip


def test_the_version_changes_with_what_ends_an_answer() -> None:
    """Kept answers of a folder whose end tokens were wrong are not given after it was mended."""
    assert replace(INFO, eos_token_ids=(2, 5)).version == replace(INFO, eos_token_ids=(5, 2)).version != INFO.version
    assert replace(INFO, digests={"model": "cd"}).version != INFO.version


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
