"""Runs a few made-up steps before an engine reports ready, so that no request waits for a kernel to be compiled or loaded.

The steps are short. A CPU's kernel is compiled per dtype, never per size, and the memory of a step's activations is not kept. So a long
step would prepare nothing that a short one does not (docs/experiments.md, 2026-11-22). A GPU's kernels have variants by the number of
tokens, which change at powers of two. There prompts of each of these numbers are computed too, and replayed where they were captured.

No KV block is taken. The block tables of the made-up sequences are empty, which stands for the pad block: their keys and values are written
there, and no request's sequence ever reads them.
"""

from __future__ import annotations

from array import array
from itertools import takewhile
from typing import Protocol

from headrace.core.ids import SlotId
from headrace.core.plan import Plan, Result, Started
from headrace.core.sampling import SamplingParams
from headrace.engine.config import EngineConfig

_DECODE_ROWS = 4
"""Sequences of the mixed step and of the last decode step: one per kind of sampling."""
_PROMPT_TOKENS = 2


class _Ticket(Protocol):
    def result(self) -> Result: ...


class _Runner(Protocol):
    def submit(self, plan: Plan) -> _Ticket: ...


def warm_up(runner: _Runner, config: EngineConfig, *, max_model_len: int, vocab_size: int, most_tokens: int = 0) -> None:
    """Run a prefill, a decode of one row, a mixed step with every kind of sampling and of log-probabilities, and a decode of all rows.

    most_tokens  also run prompts of 4, 8, .. up to this many tokens

    No slot is left in use. Raises a step's error: an engine whose warm-up fails cannot serve.
    """
    longest = max_model_len - 2
    length = min(config.max_num_batched_tokens, longest, _PROMPT_TOKENS)
    if length <= 0:
        return
    for plan in _plans(length, min(config.max_num_seqs, _DECODE_ROWS), vocab_size):
        runner.submit(plan).result()
    for tokens in prompt_lengths(min(most_tokens, longest * config.max_num_seqs)):
        runner.submit(_prompts(tokens, longest, vocab_size)).result()
    runner.submit(_plan([], ended=range(config.max_num_seqs))).result()


def prompt_lengths(most: int) -> list[int]:
    """4, 8, .. below `most`, and `most` itself."""
    return [*takewhile(lambda length: length < most, (2**power for power in range(2, 32))), most] if most else []


def _prompts(tokens: int, longest: int, vocab_size: int) -> Plan:
    """A step of this many tokens, in as few rows as the longest sequence allows."""
    sizes = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    started = tuple(_started(slot, size, SamplingParams(temperature=0.0, seed=0), vocab_size) for slot, size in enumerate(sizes))
    return _plan([(slot, 0, size, 1) for slot, size in enumerate(sizes)], started=started)


def _plans(length: int, num_rows: int, vocab_size: int) -> list[Plan]:
    greedy = SamplingParams(temperature=0.0, seed=0)
    kinds = (
        greedy,
        SamplingParams(seed=1, top_p=0.9, logprobs=1, prompt_logprobs=0),
        SamplingParams(seed=2, presence_penalty=1.0),
        SamplingParams(seed=3),
    )
    first = _plan([(0, 0, length, 1)], started=(_started(0, length, greedy, vocab_size),))
    decode = _plan([(0, length, 1, 1)])
    rest = tuple(_started(slot, length, kinds[slot % len(kinds)], vocab_size) for slot in range(1, num_rows))
    mixed = _plan([(slot, 0, length, 1) for slot in range(1, num_rows)] + [(0, length, 1, 1)], started=rest)
    batch = _plan([(slot, length, 1, 1) for slot in range(1, num_rows)] + [(0, length, 1, 1)])
    plans = [first, decode, mixed, batch]
    if num_rows == 1:  # the only slot has been greedy so far
        plans.append(_plan([(0, 0, length, 1)], started=(_started(0, length, kinds[1], vocab_size),)))
    return plans


def _started(slot: int, length: int, params: SamplingParams, vocab_size: int) -> Started:
    return Started(SlotId(slot), array("i", [position % vocab_size for position in range(length)]), length, params, 0)


def _plan(rows: list[tuple[int, int, int, int]], *, started: tuple[Started, ...] = (), ended: range = range(0)) -> Plan:
    slots, starts, counts, samples = (array("i", [row[i] for row in rows]) for i in range(4))
    return Plan(
        step_id=0,
        slots=slots,
        starts=starts,
        counts=counts,
        samples=samples,
        adapter_slots=array("i", [0] * len(rows)),
        mask_slots=array("i", [-1] * len(rows)),
        started=started,
        ended=array("i", ended),
    )
