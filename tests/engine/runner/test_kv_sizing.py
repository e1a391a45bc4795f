"""Tests the sizing of KV pools: what fits, what is said, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.core.model_info import KvGroup
from headrace.core.speculation import NGRAM, SpeculativeConfig
from headrace.engine.config import EngineConfig
from headrace.engine.kv_sizing import GIB, MIB, KvMemoryBudget, KvSizing, activation_bytes, size_kv
from headrace.policy.kvcache.manager import KvManager

pytestmark = pytest.mark.pure

FULL = KvGroup(layers=(0, 1), kv_heads=2, head_dim=64, dtype_bytes=2)
WINDOW = KvGroup(layers=(2, 3, 4, 5), kv_heads=2, head_dim=64, dtype_bytes=2, window=64)
CONFIG = EngineConfig(model="m", max_num_seqs=4, max_num_batched_tokens=32, block_size=16).checked()
BLOCK = 16 * 1024
"""Bytes of a block of FULL; one of WINDOW is twice that."""


def budget(available: int, *, weights: int = 0, activations: int = 0, num_ranks: int = 1) -> KvMemoryBudget:
    return KvMemoryBudget(
        available_bytes=available, source="MemAvailable", weight_bytes=weights, activation_bytes=activations, num_ranks=num_ranks
    )


def size(config: EngineConfig, groups: tuple[KvGroup, ...] = (FULL,), length: int = 4096, room: int = 64 * GIB) -> KvSizing:
    return size_kv(config, groups, length, budget(room))


def test_the_share_of_memory_counts_the_weights_that_are_held_already() -> None:
    config = replace(CONFIG, memory_fraction=0.5, max_num_seqs=32)
    found = size_kv(config, (FULL,), 100_000, budget(3 * GIB, weights=GIB, activations=256 * MIB))
    assert found.num_blocks == ((2 * GIB - GIB - 256 * MIB) // BLOCK,)
    assert "0.5 x (3.00 GiB free by MemAvailable + 1.00 GiB weights) - weights - 256.00 MiB for a step = 768.00 MiB" in found.lines[0]


@pytest.mark.parametrize(
    ("num_drafts", "chunked", "num_tokens", "num_sampled"),
    [(0, True, 32, 4), (5, True, 32, 24), (16, True, 32, 32), (16, False, 1024, 68)],
)
def test_a_step_has_room_for_the_logits_of_all_drafts(num_drafts: int, chunked: bool, num_tokens: int, num_sampled: int) -> None:
    """Four sequences; no step samples more positions than it has tokens."""
    drafting = SpeculativeConfig(method=NGRAM, num_speculative_tokens=num_drafts) if num_drafts else None
    config = replace(CONFIG, speculative_config=drafting, enable_chunked_prefill=chunked)
    found = activation_bytes(config, hidden_size=64, vocab_size=50_000, max_model_len=1024, itemsize=2)
    assert found == 2 * 32 * num_tokens * 64 + 3 * 4 * num_sampled * 50_000


def test_ranks_have_the_cache_of_one_process_together() -> None:
    """Each counted the weights that it holds alone, where the others' were gone from the free memory already."""
    alone = replace(CONFIG, memory_fraction=0.5, max_num_seqs=32)
    divided = replace(alone, memory_fraction=0.25)
    one = size_kv(alone, (FULL,), 100_000, budget(GIB, weights=768 * MIB, activations=64 * MIB))
    half = replace(FULL, kv_heads=1)
    each = size_kv(divided, (half,), 100_000, budget(GIB, weights=384 * MIB, activations=32 * MIB, num_ranks=2))
    assert each.num_blocks == one.num_blocks
    assert each.num_bytes * 2 == one.num_bytes
    assert "0.25 x (1.00 GiB free by MemAvailable + 2 x 384.00 MiB weights) - weights - 32.00 MiB for a step" in each.lines[0]


def test_a_size_that_is_set_is_of_each_rank_and_must_fit_with_the_others() -> None:
    fits = 100 * BLOCK
    assert size_kv(replace(CONFIG, kv_cache_bytes=fits), (FULL,), 100, budget(2 * fits, num_ranks=2)).num_bytes == fits
    with pytest.raises(ConfigError, match=rf"for each of 2 ranks\. Use at most {fits - 1:,}, "):
        size_kv(replace(CONFIG, kv_cache_bytes=fits), (FULL,), 100, budget(2 * fits - 1, num_ranks=2))
    with pytest.raises(ConfigError, match=r"for each of 2 ranks\. Use at most 99, "):
        size_kv(replace(CONFIG, num_kv_blocks=100), (FULL,), 100, budget(2 * fits - 1, num_ranks=2))


def test_the_logits_that_rank_0_has_are_reserved_once() -> None:
    sizes = {"hidden_size": 64, "vocab_size": 50_000, "max_model_len": 1024, "itemsize": 2}
    alone, divided = (activation_bytes(CONFIG, **sizes, num_ranks=num_ranks) for num_ranks in (1, 4))
    assert 4 * divided - alone == 3 * 2 * 32 * 32 * 64


def test_memory_of_adapters_is_not_given_to_the_cache() -> None:
    config = replace(CONFIG, memory_fraction=0.5, max_num_seqs=32, max_loras=2, max_cpu_loras=3)
    given = replace(budget(2 * GIB), adapter_bytes=4 * 64 * MIB)
    found = size_kv(config, (FULL,), 100_000, given)
    assert found.num_blocks == ((GIB - 256 * MIB) // BLOCK,)
    assert "- 256.00 MiB for 3 adapters, one more while it is read = 768.00 MiB" in found.lines[0]
    with pytest.raises(ConfigError, match=r"without the 256.00 MiB for adapters\. Use at most 1,879,048,192"):
        size_kv(replace(config, kv_cache_bytes=2 * GIB), (FULL,), 100_000, given)
    with pytest.raises(ConfigError, match=r"for each of 2 ranks\. Use at most 805,306,368"):  # of which each has adapters of its own
        size_kv(replace(config, kv_cache_bytes=GIB), (FULL,), 100_000, replace(given, num_ranks=2))


def test_a_draft_models_weights_and_blocks_come_out_of_the_same_share() -> None:
    """Its KV is in the blocks of full attention, layers with a window included."""
    config, draft = replace(CONFIG, memory_fraction=0.5, max_num_seqs=32), (FULL, replace(FULL, layers=(2,), window=64))
    given = replace(budget(3 * GIB, weights=GIB, activations=256 * MIB), draft_bytes=128 * MIB)
    found = size_kv(config, (FULL,), 100_000, given, draft)
    kv_bytes = (4 * GIB + 128 * MIB) // 2 - GIB - 128 * MIB - 256 * MIB
    assert found.num_blocks == (kv_bytes * 2 // (BLOCK * 5),)
    assert kv_bytes - BLOCK * 5 // 2 < found.num_bytes == found.num_blocks[0] * BLOCK * 5 // 2 <= kv_bytes
    assert "+ 1.00 GiB weights + 128.00 MiB of a draft model) - weights - 256.00 MiB for a step = 704.00 MiB" in found.lines[0]
    count = found.num_blocks[0]
    assert f"draft model: the same {count:,} blocks of 16 tokens x 3 layers, 24.0 KiB each = 422.39 MiB" in found.lines[-1]


def test_a_draft_models_blocks_are_as_many_as_those_of_full_attention() -> None:
    config = replace(CONFIG, kv_cache_bytes=200 * BLOCK, max_model_len=None)
    found = size_kv(config, (FULL, WINDOW), 1024, budget(64 * GIB), (FULL,))
    full, window = found.num_blocks
    assert found.num_bytes == (2 * full + 2 * window) * BLOCK <= 200 * BLOCK < (2 * (full + 1) + 2 * window) * BLOCK
    assert window == 29


def test_no_more_is_taken_than_all_sequences_at_full_length_need() -> None:
    found = size(CONFIG, length=100)
    assert found.num_blocks == (4 * 7 + 1,)
    assert "less is taken" in found.lines[0]


def test_explicit_blocks_include_the_pad_block() -> None:
    found = size(replace(CONFIG, num_kv_blocks=300))
    assert (found.num_blocks, found.max_model_len) == ((300,), 4096)
    assert "4,784 tokens, 1.2 sequences" in found.lines[-1]


def test_explicit_bytes_are_not_capped() -> None:
    assert size(replace(CONFIG, kv_cache_bytes=1000 * BLOCK + 5), length=100).num_blocks == (1000,)


def test_windowed_groups_take_what_they_can_use_and_full_ones_the_rest() -> None:
    """Per sequence a window of 64, a step of 32 and a beginning: 7 blocks, for 4 sequences, and the pad block."""
    found = size(replace(CONFIG, kv_cache_bytes=200 * BLOCK, max_model_len=None), (FULL, WINDOW), length=1024)
    assert found.num_blocks == (200 - 2 * 29, 29)
    assert found.max_model_len == 1024


def test_scarce_memory_gives_all_groups_the_same_tokens() -> None:
    found = size(replace(CONFIG, kv_cache_bytes=33 * BLOCK), (FULL, WINDOW), length=1024)
    assert found.num_blocks == (10, 11), "a windowed group has one block more for the beginning of its window"
    assert found.max_model_len == 144
    assert "reduced from 1,024 to 144" in found.lines[1]


def test_without_chunking_a_window_group_holds_whole_prompts() -> None:
    config = replace(CONFIG, enable_chunked_prefill=False, kv_cache_bytes=10_000 * BLOCK)
    assert size(config, (FULL, WINDOW), length=1024).num_blocks[1] == 1 + 4 * (1024 // 16 + 1)


def test_a_model_without_attention_needs_no_cache() -> None:
    assert size(CONFIG, ()).num_blocks == ()


@pytest.mark.parametrize(
    ("changes", "option", "remedy"),
    [
        ({"num_kv_blocks": 256}, "num_kv_blocks", "at least 257"),
        ({"kv_cache_bytes": 256 * BLOCK}, "kv_cache_bytes", f"at least {257 * BLOCK:,}"),
        ({"memory_fraction": 1e-9}, "memory_fraction", "raise memory_fraction"),
    ],
)
def test_a_named_length_that_does_not_fit_is_refused_with_the_arithmetic(changes: dict[str, float], option: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as refused:
        size(replace(CONFIG, max_model_len=4096, **changes))  # type: ignore[arg-type]
    assert refused.value.where == option
    assert "one sequence of 4,096 tokens needs" in str(refused.value)


def test_the_remedy_works() -> None:
    assert size(replace(CONFIG, max_model_len=4096, num_kv_blocks=257)).max_model_len == 4096
    assert size(replace(CONFIG, max_model_len=4096, kv_cache_bytes=257 * BLOCK)).max_model_len == 4096


@pytest.mark.parametrize("changes", [{"num_kv_blocks": 1}, {"kv_cache_bytes": 10}, {"memory_fraction": 1e-12}])
def test_room_for_no_token_at_all_is_refused_even_without_a_named_length(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="holds 0"):
        size(replace(CONFIG, **changes))  # type: ignore[arg-type]


@given(
    blocks=st.integers(1, 400),
    length=st.integers(1, 3000),
    window=st.integers(1, 600),
    step=st.integers(4, 300),
    block_size=st.sampled_from([1, 4, 16, 32]),
    kinds=st.sampled_from([(True,), (False,), (True, False), (False, True, False)]),
    chunked=st.booleans(),
)
def test_the_longest_sequence_promised_is_one_the_block_manager_can_hold(
    blocks: int, length: int, window: int, step: int, block_size: int, kinds: tuple[bool, ...], chunked: bool
) -> None:
    config = replace(CONFIG, max_num_batched_tokens=step, block_size=block_size, num_kv_blocks=blocks + 1, enable_chunked_prefill=chunked)
    groups = tuple(FULL if is_full else replace(WINDOW, window=window) for is_full in kinds)
    found = size_kv(config, groups, length, budget(64 * GIB))
    assert 1 <= found.max_model_len <= length
    manager = KvManager(groups, found.num_blocks, block_size)
    assert manager.shortage(found.max_model_len, step if chunked else length) is None


@pytest.mark.parametrize(
    ("changes", "named", "needed"),
    [
        ({"kv_cache_bytes": 900_000_000_000}, "kv_cache_bytes", "Use at most 2,147,483,648"),
        ({"num_kv_blocks": 10_000_000}, "num_kv_blocks", f"Use at most {2 * GIB // BLOCK:,}"),
    ],
)
def test_more_than_there_is_is_refused_with_what_there_is(changes: dict[str, Any], named: str, needed: str) -> None:
    """It was reserved all the same, and numpy's MemoryError came three times before the start was given up."""
    with pytest.raises(ConfigError, match=r"2,147,483,648 bytes .2.00 GiB. that are free by MemAvailable") as refused:
        size(replace(CONFIG, **changes), room=2 * GIB)
    assert refused.value.where == named
    assert needed in refused.value.remedy
    most = {**changes, named: int(needed.split()[-1].replace(",", ""))}
    assert size(replace(CONFIG, **most), room=2 * GIB).num_blocks[0] == 2 * GIB // BLOCK
