"""Executes plans without tensors: the scheduler and loop above are real, the tokens are deterministic, and the pace is chosen.

`fake_token` is a pure function: a test can write down the answer, and a preempted or resumed sequence must give the same one. With
`verify` every row is read back through its block table and compared.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from headrace.core.clock import Clock
from headrace.core.errors import CheckpointError, EngineFatal
from headrace.core.model_info import KvGroup, ModelInfo
from headrace.core.plan import NO_LOGPROBS, LogprobColumns, Plan, Result, Started, TokenLogprobs, int_column
from headrace.core.request import EngineRequest
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.adapters.preparer import AdapterPreparer
from headrace.engine.build import assemble
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.lab.fake_adapters import FakeAdapter, FakeAdapterLoader
from headrace.lab.fake_moves import Moves, PagedIds

MASK = 2**64 - 1
DRAWN = 1000

CATCH_UP_TOKENS = 256

Wait = Callable[[float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """vocab_size        the last id is the end token
    produced          first and last of the ids to produce instead
    refuse            the reason with which loading fails
    verify            whether to keep the paged memory and check it
    host_slots        blocks of host memory. Needs `verify`
    move_steps        (least, most) steps that a move to or from it takes, drawn for each from move_seed
    step_seconds, token_seconds, free_tokens  a step takes the first, and the second for each token beyond free_tokens
    paces             (tokens, seconds), rising tokens: a step of at most the first takes the second instead; beyond the last, token_seconds
                      more for each token
    noise             part by which a step takes more or less, drawn for each
    draft_seconds     more for each place that is drafted
    catch_up_seconds  more for each known token that the draft model has not computed, at most CATCH_UP_TOKENS in a step, the rows with the
                      fewest first; a row that has some left is followed by no drafts. 0: it knows them all
    draft_accuracy    part of the drafts that are right
    draft_rate        part of the rows that are followed by drafts
    withhold_every    about 1 of N sampling rows gives no token at its first try; 0: every row gives one
    """

    vocab_size: int = 4096
    produced: tuple[int, int] | None = None
    max_model_len: int = 4096
    num_blocks: int = 4097
    block_size: int = 16
    eos_after: int | None = None
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    free_tokens: int = 0
    stall_after_steps: int | None = None
    stall_seconds: float = 3600.0
    die_after_steps: int | None = None
    refuse: str | None = None
    verify: bool = True
    host_slots: int = 0
    move_steps: tuple[int, int] = (0, 0)
    move_seed: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    numerics: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    has_kv: bool = True
    paces: tuple[tuple[int, float], ...] = ()
    noise: float = 0.0
    draft_seconds: float = 0.0
    catch_up_seconds: float = 0.0
    draft_accuracy: float = 0.8
    draft_rate: float = 1.0
    withhold_every: int = 0

    @property
    def eos_token_id(self) -> int:
        return self.vocab_size - 1

    def token(self, seed: int, index: int, position: int, previous: int) -> int:
        first, last = self.produced or (0, self.vocab_size - 2)
        return first + fake_token(seed, index, position, previous, last - first + 2)


def fake_info(options: FakeOptions) -> ModelInfo:
    return ModelInfo(
        architecture="FakeForCausalLM",
        vocab_size=options.vocab_size,
        max_model_len=options.max_model_len,
        eos_token_ids=(options.eos_token_id,),
        kv_groups=(KvGroup(layers=(0,), kv_heads=1, head_dim=8, dtype_bytes=4),) if options.has_kv else (),
        block_size=options.block_size,
        num_blocks=(options.num_blocks,) if options.has_kv else (),
        dtype="float32",
        weight_bytes=0,
        digests=dict(options.digests),
        numerics=dict(options.numerics),
        adapters=dict(options.adapters),
        decided=("a fake runner: tokens are a function of seed and position, no model is loaded",),
    )


def fake_engine(
    outbox: Callable[[list[SequenceUpdate | Rejected]], None],
    options: FakeOptions | None = None,
    config: EngineConfig | None = None,
    *,
    block_key: str = "",
    clock: Clock = time.monotonic,
    wait: Wait | None = None,
) -> Engine:
    """Raises CheckpointError if the options say that loading fails."""
    options = options or FakeOptions()
    if options.refuse is not None:
        raise CheckpointError("fake", options.refuse)
    config = (config or EngineConfig(model="fake")).checked()
    adapters = None
    if config.enable_lora:
        loader = FakeAdapterLoader()
        adapters = AdapterPreparer(
            loader, max_loras=config.max_loras, max_cpu_loras=config.num_cpu_loras, max_num_seqs=config.max_num_seqs, clock=clock
        )
        adapters.set(config.lora_modules)
        options = replace(options, adapters=adapters.digests)
    resident = (lambda: (None,)) if adapters is None else adapters.resident
    runner = FakeRunner(options, resident=resident, clock=clock, wait=wait)
    return assemble(config, runner, fake_info(options), outbox, block_key=block_key, clock=clock, adapters=adapters)


def fake_token(seed: int, index: int, position: int, previous: int, vocab_size: int) -> int:
    """splitmix64; never the end token."""
    state = (seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9 + position * 0x94D049BB133111EB + previous + 1) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return (state ^ (state >> 31)) % (vocab_size - 1)


def adapted_seed(seed: int, adapter_digest: str) -> int:
    return seed ^ int(adapter_digest[:16] or "0", 16)


def fake_answer(request: EngineRequest, index: int, num_tokens: int, options: FakeOptions) -> list[int]:
    """The first outputs of one sequence, with the end token if it comes."""
    seed = adapted_seed(request.params.seed or 0, request.adapter_digest)
    tokens = list(request.prompt_ids)
    while len(tokens) < len(request.prompt_ids) + num_tokens:
        if options.eos_after is not None and len(tokens) - len(request.prompt_ids) >= options.eos_after:
            return [*tokens[len(request.prompt_ids) :], options.eos_token_id]
        tokens.append(options.token(seed, index, len(tokens), tokens[-1]))
    return tokens[len(request.prompt_ids) :]


@dataclass(slots=True)
class _Slot:
    started: Started
    ids: array[int]
    adapter_digest: str = ""
    withheld: int | None = None
    num_caught_up: int = 0

    @property
    def seed(self) -> int:
        return adapted_seed(self.started.params.seed or 0, self.adapter_digest)

    def as_kv(self, start: int, end: int) -> array[int]:
        """What stands for keys and values in the paged memory: an adapter's differ from those of the base model and of other adapters."""
        ids = self.ids[start:end]
        return array("i", [token_id ^ int(self.adapter_digest[:7], 16) for token_id in ids]) if self.adapter_digest else ids


class FakeRunner:
    def __init__(
        self,
        options: FakeOptions,
        *,
        resident: Callable[[], Sequence[FakeAdapter | None]] = lambda: (None,),
        clock: Clock = time.monotonic,
        wait: Wait | None = None,
    ) -> None:
        """resident: by place, as in `tensor.batch.StepAdapters`. wait: advances a virtual `clock`"""
        self.options = options
        self._resident = resident
        self._clock = clock
        self.num_steps = 0
        self._slots: dict[int, _Slot] = {}
        if options.host_slots and not options.verify:
            raise ValueError("host_slots: blocks that move need contents; set verify")
        self._verifies = options.verify and options.has_kv
        self._memory = PagedIds(options.block_size)
        self._moves = Moves(self._memory, options.block_size, options.host_slots, options.move_steps, options.move_seed)
        self._free_at = 0.0
        self._closed = threading.Event()
        self._wait: Wait = wait or self._closed.wait

    def submit(self, plan: Plan) -> FakeTicket:
        """Raises EngineFatal."""
        if plan.num_rows:
            self.num_steps += 1
        if self.options.die_after_steps is not None and self.num_steps >= self.options.die_after_steps:
            raise EngineFatal("the fake device is gone")
        result = self._compute(plan)
        self._free_at = max(self._free_at, self._clock()) + self._duration(plan, result.drafting_s)
        return FakeTicket(result, self._free_at, self._clock, self._wait)

    def close(self) -> None:
        self._closed.set()

    def _duration(self, plan: Plan, drafting_s: float) -> float:
        if not plan.num_rows:
            return 0.0
        if self.num_steps == self.options.stall_after_steps:
            return self.options.stall_seconds
        options = self.options
        free, seconds = options.free_tokens, options.step_seconds
        if options.paces:
            free, seconds = next((pace for pace in options.paces if pace[0] >= plan.num_tokens), options.paces[-1])
        drawn = fake_token(0, 0, self.num_steps, 4, 2 * DRAWN + 2) / DRAWN - 1
        return (seconds + options.token_seconds * max(0, plan.num_tokens - free)) * (1 + options.noise * drawn) + drafting_s

    def _compute(self, plan: Plan) -> Result:
        if any(mask_slot >= 0 for mask_slot in plan.mask_slots):
            raise ValueError("mask_slots: the fake runner follows no grammars; every row must say -1")
        self._apply(plan)
        resident = self._resident()
        for slot_id, place in zip(plan.slots, plan.adapter_slots, strict=True):
            adapter = resident[place]
            self._slots[slot_id].adapter_digest = adapter.digest if adapter else ""
        counts, token_ids = int_column(), int_column()
        prompt_rows, prompt_counts = int_column(), int_column()
        logprobs, prompt_logprobs = LogprobColumns(), LogprobColumns()
        asked, given_drafts = [0] * plan.num_rows, iter(plan.drafts)
        num_drafts = plan.num_drafts or int_column([0]) * plan.num_rows
        columns = zip(plan.slots, plan.starts, plan.counts, plan.samples, num_drafts, strict=True)
        for row, (slot_id, start, count, samples, most) in enumerate(columns):
            slot = self._slots[slot_id]
            drafts = list(islice(given_drafts, max(samples - 1, 0)))
            tokens: list[int] = []
            if not self._is_behind(slot, start + count - len(drafts)):
                self._read_and_write(slot_id, slot, start, count, drafts)
                tokens = self._sample(slot, start + count - len(drafts), drafts) if samples else []
                if slot.started.params.prompt_logprobs is not None:
                    prompt_rows.append(row)
                    prompt_counts.append(self._add_prompt_logprobs(slot, start, count, prompt_logprobs))
            counts.append(len(tokens))
            token_ids.extend(tokens)
            for token_id in tokens:
                logprobs.append(self._logprobs(token_id, slot.started.params.logprobs))
            asked[row] = most if tokens else 0
        draft_counts, next_drafts, drafting_s = self._draft_rows(plan, asked)
        self._moves.advance()
        return Result(
            step_id=plan.step_id,
            token_counts=counts,
            token_ids=token_ids,
            logprobs=logprobs if any(logprobs.ranks) else NO_LOGPROBS,
            prompt_rows=prompt_rows,
            prompt_counts=prompt_counts,
            prompt_logprobs=prompt_logprobs,
            draft_counts=draft_counts if next_drafts else int_column(),
            drafts=next_drafts,
            drafting_s=drafting_s,
            moves_done=self._moves.take_done(),
        )

    @staticmethod
    def _is_behind(slot: _Slot, num_needed: int) -> bool:
        """Whether a row was planned on a token that was then withheld: it gives none either."""
        return slot.withheld is not None and num_needed > len(slot.ids) == slot.withheld

    def _apply(self, plan: Plan) -> None:
        for slot_id in plan.ended:
            self._slots.pop(slot_id, None)
        for started in plan.started:
            self._slots[started.slot] = _Slot(started, array("i", started.token_ids))
        if self._verifies:
            self._memory.apply(plan)
        self._moves.apply(plan)

    def _read_and_write(self, slot_id: int, slot: _Slot, start: int, count: int, drafts: list[int]) -> None:
        known = start + count - len(drafts)
        if known > len(slot.ids):
            raise AssertionError(f"slot {slot_id}: asked for positions up to {known}, knows {len(slot.ids)} ids")
        if drafts:
            del slot.ids[known:]
            slot.ids.extend(drafts)
        if self._verifies:
            self._memory.write(slot_id, start, slot.as_kv(start, start + count))
            self._memory.check(slot_id, slot.as_kv(0, start + count))

    def _sample(self, slot: _Slot, position: int, drafts: list[int]) -> list[int]:
        """One id, and one more after each draft that was right."""
        del slot.ids[position:]
        if self._is_withheld(slot, position):
            return []
        for draft in [*drafts, None]:
            slot.ids.append(self._token(slot, len(slot.ids)))
            if slot.ids[-1] != draft:
                break
        return slot.ids[position:].tolist()

    def _is_withheld(self, slot: _Slot, position: int) -> bool:
        every = self.options.withhold_every
        is_again, slot.withheld = slot.withheld == position, None
        if not every or is_again or fake_token(slot.seed, slot.started.index, position, 1, every + 1):
            return False
        slot.withheld = position
        return True

    def _token(self, slot: _Slot, position: int) -> int:
        started = slot.started
        if self.options.eos_after is not None and position - started.num_prompt_tokens >= self.options.eos_after:
            return self.options.eos_token_id
        return self.options.token(slot.seed, started.index, position, slot.ids[position - 1])

    def _draft_rows(self, plan: Plan, asked: list[int]) -> tuple[array[int], array[int], float]:
        """Returns their counts, the drafts, and the seconds that they took."""
        slots = [self._slots[slot_id] for slot_id in plan.slots]
        catch_up_s = self._catch_up([slot for slot, most in zip(slots, asked, strict=True) if most])
        counts, drafts = int_column(), int_column()
        for slot_id, slot, most in zip(plan.slots, slots, asked, strict=True):
            can_draft = most and (not catch_up_s or slot.num_caught_up == len(slot.ids))
            following = self._draft(slot_id, slot, most) if can_draft else []
            slot.num_caught_up += max(0, len(following) - 1)
            counts.append(len(following))
            drafts.extend(following)
        return counts, drafts, catch_up_s + self.options.draft_seconds * max(counts, default=0)

    def _catch_up(self, slots: list[_Slot]) -> float:
        """Returns the seconds that it takes."""
        if not self.options.catch_up_seconds:
            return 0.0
        left = CATCH_UP_TOKENS
        for slot in slots:
            slot.num_caught_up = min(slot.num_caught_up, len(slot.ids) - 1)
        for slot in sorted(slots, key=lambda slot: len(slot.ids) - slot.num_caught_up):
            count = min(left, len(slot.ids) - slot.num_caught_up)
            slot.num_caught_up += count
            left -= count
        return (CATCH_UP_TOKENS - left) * self.options.catch_up_seconds

    def _draft(self, slot_id: int, slot: _Slot, most: int) -> list[int]:
        known = len(slot.ids)
        if self._verifies:
            self._memory.check_held(slot_id, known + most)
        if not self._draw(slot, known, 2, self.options.draft_rate):
            return []
        for position in range(known, known + most):
            token_id = self._token(slot, position)
            is_right = self._draw(slot, position, 3, self.options.draft_accuracy)
            slot.ids.append(token_id if is_right else (token_id + 1) % self.options.vocab_size)
        drafts = slot.ids[known:].tolist()
        del slot.ids[known:]
        return drafts

    @staticmethod
    def _draw(slot: _Slot, position: int, what: int, chance: float) -> bool:
        return fake_token(slot.seed, slot.started.index, position, what, DRAWN + 1) < chance * DRAWN

    def _add_prompt_logprobs(self, slot: _Slot, start: int, count: int, logprobs: LogprobColumns) -> int:
        last = min(start + count, slot.started.num_prompt_tokens - 1)
        wanted = slot.started.params.prompt_logprobs
        positions = range(start + 1, last + 1)
        for position in positions:
            logprobs.append(self._logprobs(slot.ids[position], wanted))
        return len(positions)

    def _logprobs(self, token_id: int, num_top: int | None) -> TokenLogprobs | None:
        if num_top is None:
            return None
        top_ids = tuple((token_id + i) % self.options.vocab_size for i in range(num_top))
        return TokenLogprobs(token_id, -0.5, 1, top_ids, tuple(-0.5 - i for i in range(num_top)))


class FakeTicket:
    def __init__(self, result: Result, ready_at: float, clock: Clock, wait: Wait) -> None:
        self._result, self._ready_at = result, ready_at
        self._clock, self._wait = clock, wait

    def result(self) -> Result:
        remaining = self._ready_at - self._clock()
        if remaining > 0:
            self._wait(remaining)
        return self._result
