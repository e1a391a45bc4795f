"""Tests the version of a loaded model, under which its answers are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.model_info import ModelInfo

pytestmark = pytest.mark.pure

INFO = ModelInfo(
    architecture="LlamaForCausalLM", vocab_size=8, max_model_len=8, eos_token_ids=(2,), kv_groups=(), block_size=1, num_blocks=(),
    dtype="float32", weight_bytes=1, digests={"model": "ab"}, numerics={"dtype": "float32"},
)  # fmt: skip


def test_the_version_changes_with_what_ends_an_answer() -> None:
    """Kept answers of a folder whose end tokens were wrong are not given after it was mended."""
    assert replace(INFO, eos_token_ids=(2, 5)).version == replace(INFO, eos_token_ids=(5, 2)).version != INFO.version
    assert replace(INFO, digests={"model": "cd"}).version != INFO.version
