"""Runs plans without tensors over real paged memory, so that a wrong slot, a block freed too early or a stale table shows.

Its cache stores, per block and offset, the token whose KV would be there. A row reads its whole context back through the block table and
raises `Corruption` unless it finds exactly its own tokens. The next token is a function of what was read, so any mistake also changes the
output. `next_token` is the reference implementation: it looks at the tokens alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from hashlib import blake2b
from itertools import islice

from headrace.core.model_info import KvGroup
from headrace.core.plan import LogprobColumns, MoveKind, Plan, Result, Started, TokenLogprobs, int_column

EMPTY = -1


class Corruption(AssertionError):
    """The cache did not hold what the sequence needs."""


def next_token(context: list[int], vocab_size: int, index: int) -> int:
    """Token that follows `context` in sequence `index` of a request. Never the last id of the vocabulary, so a test may plant that one."""
    digest = blake2b(array("i", [index, *context]).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (vocab_size - 1)


def expected_tokens(prompt: list[int], count: int, vocab_size: int, index: int = 0) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, vocab_size, index))
    return context[len(prompt) :]


class DoneTicket:
    def __init__(self, result: Result) -> None:
        self._result = result

    def result(self) -> Result:
        return self._result


class LazyTicket:
    """A step computed when somebody waits for it, after all earlier ones: what an overlapped runner looks like to the loop."""

    def __init__(self, runner: OracleRunner) -> None:
        self._runner = runner
        self.done: Result | Exception | None = None

    def result(self) -> Result:
        self._runner.run_until(self)
        if isinstance(self.done, Exception):
            raise self.done
        assert self.done is not None
        return self.done


class OracleRunner:
    """Implements `engine.steps.Runner`. lazy=True delays computing until results are asked for (depth 2)."""

    def __init__(
        self, groups: tuple[KvGroup, ...], num_blocks: tuple[int, ...], block_size: int, *, vocab_size: int = 97, lazy: bool = False
    ) -> None:
        self.groups, self.block_size, self.vocab_size, self.lazy = groups, block_size, vocab_size, lazy
        self.memory = [[[EMPTY] * block_size for _ in range(total)] for total in num_blocks]
        self.tables: dict[tuple[int, int], dict[int, int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.started: dict[int, Started] = {}
        self.fail_when: list[int] = []
        self.num_steps = 0
        self._seen: list[Started] = []
        """Everything ever started: the loop repeats state changes after a failed step."""
        self._queue: deque[tuple[Plan, LazyTicket]] = deque()

    def submit(self, plan: Plan) -> DoneTicket | LazyTicket:
        if not self.lazy:
            return DoneTicket(self.compute(plan))
        ticket = LazyTicket(self)
        self._queue.append((plan, ticket))
        return ticket

    def run_until(self, wanted: LazyTicket) -> None:
        while wanted.done is None:
            plan, ticket = self._queue.popleft()
            try:
                ticket.done = self.compute(plan)
            except Exception as error:
                ticket.done = error

    def close(self) -> None:
        self._queue.clear()

    def compute(self, plan: Plan) -> Result:
        self._apply(plan)
        self.num_steps += plan.num_rows > 0
        rows = list(zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True))
        if len(set(plan.slots)) < len(plan.slots):
            raise Corruption(f"a slot has two rows: {list(plan.slots)}")
        given_drafts = iter(plan.drafts)
        drafts = [list(islice(given_drafts, max(samples - 1, 0))) for samples in plan.samples]
        for (slot, start, count, _), given in zip(rows, drafts, strict=True):
            if given:
                self.tokens[slot][start + count - len(given) :] = given
            self._write(slot, start, count)
        sampled = [self._read_and_sample(*row, given) for row, given in zip(rows, drafts, strict=True)]
        following = [self._draft(slot, count) for slot, count in zip(plan.slots, plan.num_drafts, strict=False)]
        counts = array("i", [len(tokens) for tokens in sampled])
        prompt_rows, prompt_counts, prompt_logprobs = int_column(), int_column(), LogprobColumns()
        for i, row in enumerate(rows):
            if found := self._prompt_logprobs(*row):
                prompt_rows.append(i)
                prompt_counts.append(len(found))
                for entry in found:
                    prompt_logprobs.append(entry)
        flat = array("i", [token for tokens in sampled for token in tokens])
        return Result(
            step_id=plan.step_id,
            token_counts=counts,
            token_ids=flat,
            prompt_rows=prompt_rows,
            prompt_counts=prompt_counts,
            prompt_logprobs=prompt_logprobs,
            draft_counts=array("i", map(len, following)),
            drafts=array("i", [draft for drafts in following for draft in drafts]),
        )

    def _apply(self, plan: Plan) -> None:
        for slot in plan.ended:
            self.tokens.pop(slot, None)
            for group in range(len(self.groups)):
                self.tables.pop((group, slot), None)
        for started in plan.started:
            is_repeated = any(started is known for known in self._seen)
            if started.slot in self.tokens and not is_repeated:
                raise Corruption(f"slot {started.slot} was given away before its last holder was announced as ended")
            self._seen.append(started)
            self.tokens[started.slot] = list(started.token_ids)
            self.started[started.slot] = started
        entries = zip(plan.table_groups, plan.table_slots, plan.table_indices, plan.table_blocks, strict=True)
        for group, slot, index, block in entries:
            self.tables.setdefault((group, slot), {})[index] = block
        for kind, group, source, target in zip(plan.move_kinds, plan.move_groups, plan.move_sources, plan.move_targets, strict=True):
            if kind != MoveKind.COPY:
                raise Corruption(f"a move of kind {MoveKind(kind).name}, and nowhere to move to")
            self.memory[group][target] = list(self.memory[group][source])

    def _write(self, slot: int, start: int, count: int) -> None:
        tokens = self.tokens[slot][start : start + count]
        if len(tokens) != count:
            raise Corruption(f"slot {slot} was asked to compute unknown positions {start}..{start + count}")
        for token in tokens:
            if token in self.fail_when:
                raise RuntimeError("a poisoned token")
        for group in range(len(self.groups)):
            for position, token in enumerate(tokens, start):
                self._cell(group, slot, position)[position % self.block_size] = token

    def _prompt_logprobs(self, slot: int, start: int, count: int, samples: int) -> tuple[TokenLogprobs, ...]:
        """For each prompt token after a computed position: its id, and its position as the log-probability."""
        started = self.started[slot]
        if started.params.prompt_logprobs is None:
            return ()
        last = min(start + count, started.num_prompt_tokens - 1)
        return tuple(TokenLogprobs(self.tokens[slot][p], -float(p), 1) for p in range(start + 1, last + 1))

    def _cell(self, group: int, slot: int, position: int) -> list[int]:
        block = self.tables[group, slot][position // self.block_size]
        if block == 0:
            raise Corruption("the pad block is in use")
        return self.memory[group][block]

    def _read_and_sample(self, slot: int, start: int, count: int, samples: int, drafts: list[int]) -> list[int]:
        end = start + count
        tokens = self.tokens[slot]
        for index, group in enumerate(self.groups):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                found = self._cell(index, slot, position)[position % self.block_size]
                if found != tokens[position]:
                    raise Corruption(f"slot {slot} position {position}: cache holds {found}, sequence has {tokens[position]}")
        if not samples:
            return []
        known = end - len(drafts)
        del tokens[known:]
        for draft in [*drafts, None]:
            tokens.append(next_token(tokens, self.vocab_size, self.started[slot].index))
            if tokens[-1] != draft:
                break
        return tokens[known:]

    def _draft(self, slot: int, count: int) -> list[int]:
        """The tokens that will follow, about one in three replaced by another."""
        context = list(self.tokens[slot])
        for position in range(len(context), len(context) + count):
            for group in range(len(self.groups)):
                self._cell(group, slot, position)
            token = next_token(context, self.vocab_size, self.started[slot].index)
            context.append((token + 1) % (self.vocab_size - 1) if token % 3 == 0 else token)
        return context[len(context) - count :] if count else []
