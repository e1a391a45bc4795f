"""Sizes the KV pools, and says the arithmetic for the operator.

Full groups share what groups with a window leave. The returned count includes block 0 of each pool, the pad block.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.model_info import KvGroup
from headrace.engine.config import EngineConfig

GIB = 1 << 30
MIB = 1 << 20
SPARE_BYTES = 256 * MIB
MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizing:
    """
    num_blocks       per KV group, pad block included
    num_full_blocks  of a group with full attention, from which the other counts follow; pad block included
    num_bytes        of all pools, a draft model's included
    lines            the arithmetic, for the operator
    """

    num_blocks: tuple[int, ...]
    num_full_blocks: int
    num_bytes: int
    max_model_len: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemoryBudget:
    """One rank's. What rank 0 alone holds is divided between all: the ranks have the same KV, and the least is that of all.

    available_bytes             beside the weights of all ranks of this machine, which are `num_ranks`
    weight_bytes, draft_bytes   weights of the model and of its draft model, which count towards `memory_fraction`
    activation_bytes            reserved for a step's tensors
    adapter_bytes               reserved for adapters
    """

    available_bytes: int
    source: str
    weight_bytes: int
    activation_bytes: int
    adapter_bytes: int = 0
    draft_bytes: int = 0
    num_ranks: int = 1


def size_kv(
    config: EngineConfig,
    groups: tuple[KvGroup, ...],
    max_model_len: int,
    budget: KvMemoryBudget,
    draft_groups: tuple[KvGroup, ...] = (),
    most: int | None = None,
) -> KvSizing:
    """
    draft_groups  of the draft model, whose KV is in the blocks of a full-attention group, whatever its layers see
    most          `num_full_blocks` that fit every rank of the replica; None: there is no other rank, or it is not known yet

    Raises ConfigError if no sequence of the asked length fits, or if the operator set more than there is free memory.
    """
    if not groups:
        return KvSizing(
            num_blocks=(), num_full_blocks=1, num_bytes=0, max_model_len=max_model_len, lines=("KV cache: this model needs none",)
        )
    pools = _Pools(config, groups, max_model_len, draft_groups)
    full_blocks, line = _full_blocks(pools, budget)
    if most is not None and most <= full_blocks:
        full_blocks, line = most - 1, f"{line}; {most:,} blocks are taken, as many as fit every rank"
    _check_fits(pools, full_blocks, budget)
    length = pools.longest(full_blocks)
    lines = [line]
    if length < max_model_len:
        if config.max_model_len is not None or length < 1:
            raise _too_small(pools, length, line)
        lines.append(f"max_model_len: reduced from {max_model_len:,} to {length:,}, the longest sequence that fits the KV cache")
    num_blocks = pools.counts(full_blocks)
    lines += [_describe(config, group, count, length) for group, count in zip(groups, num_blocks, strict=True)]
    if draft_groups:
        lines.append(_describe_draft(pools, 1 + full_blocks))
    return KvSizing(
        num_blocks=num_blocks,
        num_full_blocks=1 + full_blocks,
        num_bytes=pools.num_bytes(full_blocks),
        max_model_len=length,
        lines=tuple(lines),
    )


def step_tokens(config: EngineConfig, max_model_len: int) -> int:
    return config.max_num_batched_tokens if config.enable_chunked_prefill else max(config.max_num_batched_tokens, max_model_len)


def activation_bytes(config: EngineConfig, hidden_size: int, vocab_size: int, max_model_len: int, itemsize: int, num_ranks: int = 1) -> int:
    """A generous bound: 32 times the hidden size per token, and three copies of the sampled positions' logits in float32, which rank 0
    has for the `num_ranks` of its machine."""
    num_tokens = step_tokens(config, max_model_len)
    num_drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    num_sampled = min(config.max_num_seqs * (1 + num_drafts), num_tokens)
    return itemsize * 32 * num_tokens * hidden_size + 4 * 3 * num_sampled * vocab_size // num_ranks


def out_of_memory(sizing: KvSizing, wanted_bytes: int) -> ConfigError:
    taken = sizing.num_bytes
    fits = taken - wanted_bytes - SPARE_BYTES
    rule = f"the device's memory ran out beside {taken:,} bytes ({describe_bytes(taken)}) of KV cache"
    if fits <= 0:
        return ConfigError("max_num_batched_tokens", rule, "Use a smaller one, a smaller max_num_seqs, or a smaller model.")
    return ConfigError("kv_cache_bytes", rule, f"Use at most {fits:,}, or free the device's memory.")


@dataclass(frozen=True, slots=True)
class _Pools:
    """Sizes as functions of `full_blocks`: the blocks of a full-attention group, pad block excluded."""

    config: EngineConfig
    groups: tuple[KvGroup, ...]
    max_model_len: int
    draft_groups: tuple[KvGroup, ...] = ()

    @property
    def draft_block_bytes(self) -> int:
        return sum(group.block_bytes(self.config.block_size) for group in self.draft_groups)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def resident(self, window: int) -> int:
        return min(self.max_model_len, window + self.config.max_steps_in_flight * step_tokens(self.config, self.max_model_len))

    def counts(self, full_blocks: int) -> tuple[int, ...]:
        return tuple(
            1 + (full_blocks if group.window is None else min(full_blocks + 1, self._bound(group.window))) for group in self.groups
        )

    def _bound(self, window: int) -> int:
        """A window may begin within a block: one more per sequence."""
        return self.config.max_num_seqs * (self.blocks_for(self.resident(window)) + 1)

    def num_bytes(self, full_blocks: int) -> int:
        size = self.config.block_size
        own = sum(count * group.block_bytes(size) for count, group in zip(self.counts(full_blocks), self.groups, strict=True))
        return own + (1 + full_blocks) * self.draft_block_bytes

    def within(self, max_bytes: int) -> int:
        """The most `full_blocks` within the bytes; -1: not even the pad blocks fit."""
        low, high = -1, MAX_BLOCKS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_bytes(middle) <= max_bytes else (low, middle - 1)
        return low

    def longest(self, full_blocks: int) -> int:
        """The longest sequence that fits; below 1 when none does."""
        for group, count in zip(self.groups, self.counts(full_blocks), strict=True):
            if group.window is None or self.blocks_for(self.resident(group.window)) + 1 > count - 1:
                return min(self.max_model_len, full_blocks * self.config.block_size)
        return self.max_model_len


def _full_blocks(pools: _Pools, budget: KvMemoryBudget) -> tuple[int, str]:
    config = pools.config
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks - 1, f"KV memory: {config.num_kv_blocks:,} blocks per group, as num_kv_blocks says"
    if config.kv_cache_bytes is not None:
        return pools.within(config.kv_cache_bytes), f"KV memory: {describe_bytes(config.kv_cache_bytes)}, as kv_cache_bytes says"
    held, num_ranks = budget.weight_bytes + budget.draft_bytes, budget.num_ranks
    reserved = held + budget.activation_bytes + budget.adapter_bytes
    fraction = config.memory_fraction if config.memory_bytes is None else 1 / num_ranks
    kv_bytes = int(fraction * (budget.available_bytes + num_ranks * held)) - reserved
    free, weights, step = (describe_bytes(n) for n in (budget.available_bytes, budget.weight_bytes, budget.activation_bytes))
    adapters = (
        f"- {describe_bytes(budget.adapter_bytes)} for {config.num_cpu_loras} adapters, one more while it is read "
        if budget.adapter_bytes
        else ""
    )
    ranks = f"{num_ranks} x " if num_ranks > 1 else ""
    draft = f" + {ranks}{describe_bytes(budget.draft_bytes)} of a draft model" if budget.draft_bytes else ""
    line = (
        f"KV memory: {fraction:g} x ({free} free by {budget.source} + {ranks}{weights} weights{draft}) "
        f"- weights - {step} for a step {adapters}= {describe_bytes(kv_bytes)}"
    )
    within, enough = pools.within(kv_bytes), config.max_num_seqs * pools.blocks_for(pools.max_model_len)
    if enough < within:
        line += f"; less is taken: max_num_seqs ({config.max_num_seqs}) sequences of max_model_len ({pools.max_model_len:,}) fit"
    return min(within, enough), line


def _check_fits(pools: _Pools, full_blocks: int, budget: KvMemoryBudget) -> None:
    config, needed, num_ranks = pools.config, pools.num_bytes(full_blocks), budget.num_ranks
    free = budget.available_bytes // num_ranks - budget.adapter_bytes
    if needed <= free:
        return
    if config.num_kv_blocks is not None:
        option, most = "num_kv_blocks", f"{1 + max(0, pools.within(free)):,}"
    elif config.kv_cache_bytes is not None:
        option, most = "kv_cache_bytes", f"{free:,}"
    else:
        return
    adapters = f", without the {describe_bytes(budget.adapter_bytes)} for adapters" if budget.adapter_bytes else ""
    ranks = f", for each of {num_ranks} ranks" if num_ranks > 1 else ""
    raise ConfigError(
        option,
        f"{needed:,} bytes ({describe_bytes(needed)}) of KV cache do not fit the {free:,} bytes ({describe_bytes(free)}) that are free by "
        f"{budget.source}{adapters}{ranks}",
        f"Use at most {most}, leave the option out, or free memory.",
    )


def _too_small(pools: _Pools, length: int, line: str) -> ConfigError:
    config, wanted = pools.config, pools.max_model_len
    blocks = pools.blocks_for(wanted)
    needed = pools.num_bytes(blocks)
    if config.num_kv_blocks is not None:
        option, remedy = "num_kv_blocks", f"Use at least {blocks + 1:,} or a smaller max_model_len."
    elif config.kv_cache_bytes is not None:
        option, remedy = "kv_cache_bytes", f"Use at least {needed:,} or a smaller max_model_len."
    else:
        option = "memory_fraction" if config.memory_bytes is None else "memory_bytes"
        remedy = f"Free memory, raise {option}, or use a smaller max_model_len."
    return ConfigError(
        option,
        f"one sequence of {wanted:,} tokens needs {describe_bytes(needed)} of KV cache, what there is holds {max(length, 0):,} ({line})",
        remedy,
    )


def _describe(config: EngineConfig, group: KvGroup, count: int, max_model_len: int) -> str:
    size, tokens = group.block_bytes(config.block_size), (count - 1) * config.block_size
    kind = "full attention" if group.window is None else f"window {group.window:,}"
    fits = f", {tokens / max_model_len:.1f} sequences of max_model_len {max_model_len:,}" if group.window is None else ""
    return (
        f"KV cache: {count:,} blocks of {config.block_size} tokens x {len(group.layers)} layers ({kind}), "
        f"{describe_bytes(size)} each = {describe_bytes(count * size)}; {tokens:,} tokens{fits}"
    )


def _describe_draft(pools: _Pools, count: int) -> str:
    num_layers, size = sum(len(group.layers) for group in pools.draft_groups), pools.draft_block_bytes
    return (
        f"KV cache of the draft model: the same {count:,} blocks of {pools.config.block_size} tokens x {num_layers} layers, "
        f"{describe_bytes(size)} each = {describe_bytes(count * size)}"
    )


def describe_bytes(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1024:.1f} KiB"
