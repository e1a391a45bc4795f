"""How many KV blocks each group gets, in arithmetic that can be shown to people. Pure: numbers in, numbers and sentences out.

A windowed group never needs more than its window and one step per running sequence; full groups share the rest, so that all groups hold
equally many tokens where they can. Block 0 of each pool is the pad block and is counted in what is returned.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.kvgroup import KvGroup
from headrace.engine.config import EngineConfig

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizing:
    """num_blocks per group, pad block included; max_model_len that one sequence can really reach; lines for people."""

    num_blocks: tuple[int, ...]
    max_model_len: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the machine leaves once the weights are loaded.

    available_bytes   free now
    source            who says so
    weight_bytes      held by weights: part of the share that `memory_fraction` speaks of
    activation_bytes  kept aside for the step's own tensors
    """

    available_bytes: int
    source: str
    weight_bytes: int
    activation_bytes: int


def size_kv(config: EngineConfig, groups: tuple[KvGroup, ...], max_model_len: int, budget: Budget) -> KvSizing:
    """Blocks per group for a model whose longest context is max_model_len.

    Raises: ConfigError when not one sequence fits: of max_model_len if the operator named it, else of a single block.
    """
    if not groups:
        return KvSizing(num_blocks=(), max_model_len=max_model_len, lines=("KV cache: this model needs none",))
    full_blocks, lines = _full_blocks(config, groups, max_model_len, budget)
    length = min(max_model_len, _longest(config, groups, full_blocks, max_model_len))
    if length < max_model_len:
        if config.max_model_len is not None or length < 1:
            raise _too_small(config, groups, max_model_len, length, lines)
        lines.append(f"max_model_len: reduced from {max_model_len:,} to {length:,}, the longest sequence that fits the KV cache")
    num_blocks = _group_blocks(config, groups, full_blocks)
    lines += [_describe(config, group, count, length) for group, count in zip(groups, num_blocks, strict=True)]
    return KvSizing(num_blocks=num_blocks, max_model_len=length, lines=tuple(lines))


def activation_bytes(config: EngineConfig, hidden_size: int, vocab_size: int) -> int:
    """A generous guess at the largest tensors alive at once in a step, in float32: 32 rows of the hidden size per token (the
    feed-forward's two halves are 8 at most in known models), the sampled rows' logits thrice, and a piece of prompt logits."""
    return 4 * (32 * config.max_num_batched_tokens * hidden_size + 3 * config.max_num_seqs * vocab_size) + 64 * MIB


def _full_blocks(config: EngineConfig, groups: tuple[KvGroup, ...], max_model_len: int, budget: Budget) -> tuple[int, list[str]]:
    """Blocks of the full groups, without the pad block; how that came about."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks - 1, [f"KV memory: {config.num_kv_blocks:,} blocks per group, as num_kv_blocks says"]
    if config.kv_cache_bytes is not None:
        room, line = config.kv_cache_bytes, f"KV memory: {_gib(config.kv_cache_bytes)}, as kv_cache_bytes says"
        return _blocks_within(config, groups, room), [line]
    total = budget.available_bytes + budget.weight_bytes
    room = int(config.memory_fraction * total) - budget.weight_bytes - budget.activation_bytes
    line = (
        f"KV memory: {config.memory_fraction:g} x ({_gib(budget.available_bytes)} free by {budget.source} + {_gib(budget.weight_bytes)} "
        f"weights) - weights - {_gib(budget.activation_bytes)} for a step = {_gib(room)}"
    )
    within, enough = _blocks_within(config, groups, room), config.max_num_seqs * _blocks_for(config, max_model_len)
    if enough < within:
        line += f"; no more than max_num_seqs ({config.max_num_seqs}) sequences of max_model_len ({max_model_len:,}) is taken"
    return min(within, enough), [line]


def _blocks_within(config: EngineConfig, groups: tuple[KvGroup, ...], room: int) -> int:
    """Largest number of full-group blocks whose pools, windowed groups' included, stay within `room` bytes; -1: not even pad blocks."""
    low, high = -1, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        if _pool_bytes(config, groups, middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low if any(group.window is None for group in groups) else min(low, max(_window_bound(config, group) for group in groups))


def _pool_bytes(config: EngineConfig, groups: tuple[KvGroup, ...], full_blocks: int) -> int:
    counts = _group_blocks(config, groups, full_blocks)
    blocks = sum(count * group.block_bytes(config.block_size) for count, group in zip(counts, groups, strict=True))
    return blocks + config.max_num_seqs * sum(group.state_bytes for group in groups)


def _group_blocks(config: EngineConfig, groups: tuple[KvGroup, ...], full_blocks: int) -> tuple[int, ...]:
    """Per group, pad block included. A windowed group gets one block more: its window may begin in the middle of one."""
    return tuple(1 + (full_blocks if group.window is None else min(full_blocks + 1, _window_bound(config, group))) for group in groups)


def _window_bound(config: EngineConfig, group: KvGroup) -> int:
    """All a windowed group can use: per sequence, blocks for the window and one step's tokens, and one for the beginning."""
    assert group.window is not None
    return config.max_num_seqs * (_blocks_for(config, group.window + config.max_num_batched_tokens) + 1)


def _longest(config: EngineConfig, groups: tuple[KvGroup, ...], full_blocks: int, max_model_len: int) -> int:
    """Longest sequence that fits alone, at most max_model_len; below 1 when none does."""
    for group, count in zip(groups, _group_blocks(config, groups, full_blocks), strict=True):
        if group.window is not None:
            whole = min(max_model_len, group.window + config.max_num_batched_tokens)
            if _blocks_for(config, whole) + 1 <= count - 1:
                continue
        max_model_len = min(max_model_len, full_blocks * config.block_size)
    return max_model_len


def _too_small(config: EngineConfig, groups: tuple[KvGroup, ...], wanted: int, length: int, lines: list[str]) -> ConfigError:
    needed = _pool_bytes(config, groups, _blocks_for(config, wanted))
    if config.num_kv_blocks is not None:
        option, remedy = "num_kv_blocks", f"Use at least {_blocks_for(config, wanted) + 1:,} or a smaller max_model_len."
    elif config.kv_cache_bytes is not None:
        option, remedy = "kv_cache_bytes", f"Use at least {needed:,} or a smaller max_model_len."
    else:
        option, remedy = "memory_fraction", "Free memory, raise memory_fraction, or use a smaller max_model_len."
    reason = f"one sequence of {wanted:,} tokens needs {_gib(needed)} of KV cache, what there is holds {max(length, 0):,} tokens"
    return ConfigError(option, f"{reason} ({lines[0]})", remedy)


def _describe(config: EngineConfig, group: KvGroup, count: int, max_model_len: int) -> str:
    size = group.block_bytes(config.block_size)
    kind = "full attention" if group.window is None else f"window {group.window:,}"
    tokens = (count - 1) * config.block_size
    fits = "" if group.window is not None else f", {tokens / max_model_len:.1f} sequences of max_model_len {max_model_len:,}"
    return (
        f"KV cache: {count:,} blocks of {config.block_size} tokens x {len(group.layers)} layers ({kind}), "
        f"{size / 1024:,.0f} KiB each = {_gib(count * size)}; {tokens:,} tokens{fits}"
    )


def _blocks_for(config: EngineConfig, num_tokens: int) -> int:
    return -(-num_tokens // config.block_size)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB // 10 else f"{num_bytes / MIB:.1f} MiB"
