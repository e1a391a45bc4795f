"""Runs a few made-up steps, so that kernels are compiled before an engine reports ready."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile

from headrace.core.clock import Clock
from headrace.core.ids import SlotId
from headrace.core.plan import Plan, Started
from headrace.core.sampling import SamplingParams
from headrace.engine.config import EngineConfig
from headrace.engine.steps import Runner
from headrace.tensor.kernels import KernelCompiler

log = logging.getLogger(__name__)

_DECODE_ROWS = 4
_PROMPT_TOKENS = 2
MAX_TOKENS = _DECODE_ROWS * _PROMPT_TOKENS
"""The most that a step of several rows has, whatever the engine's own limit is."""


def warm_up(
    runner: Runner, config: EngineConfig, *, max_model_len: int, vocab_size: int, most_tokens: int = 0, has_adapters: bool = False
) -> None:
    """most_tokens   also run prompts of 4, 8, .. up to this many tokens
    has_adapters  repeat all with the adapter in place 1

    No slot is left in use and no KV block is taken: the block tables are empty, which stands for the pad block. Raises a step's error:
    an engine whose warm-up fails cannot serve.
    """
    longest = max_model_len - 2
    length = min(config.max_num_batched_tokens, longest, _PROMPT_TOKENS)
    if length <= 0:
        return
    for place in (0, 1) if has_adapters else (0,):
        for plan in _plans(length, min(config.max_num_seqs, _DECODE_ROWS), vocab_size):
            runner.submit(_adapted(plan, place)).result()
        for tokens in prompt_lengths(min(most_tokens, longest * config.max_num_seqs)):
            runner.submit(_adapted(_prompts(tokens, longest, vocab_size), place)).result()
        runner.submit(_plan([], ended=range(config.max_num_seqs))).result()


def _adapted(plan: Plan, place: int) -> Plan:
    return replace(plan, adapter_slots=array("i", [place]) * plan.num_rows)


def prompt_lengths(most: int) -> list[int]:
    return [*takewhile(lambda length: length < most, (2**power for power in range(2, 32))), most] if most else []


def _prompts(tokens: int, longest: int, vocab_size: int) -> Plan:
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
        mask_slots=array("i", [-1] * len(rows)),
        started=started,
        ended=array("i", ended),
    )


LOG_INTERVAL_S = 5.0


class CompileNotice:
    def __init__(self, kept: str, expected: int | None = None, clock: Clock = time.perf_counter) -> None:
        self._kept, self._expected, self._clock = kept, expected, clock
        self._began_s = self._logged_s = 0.0
        self._num_compiled: int | None = None

    def __call__(self, num_compiled: int) -> None:
        now = self._clock()
        if self._num_compiled is None:
            self._began_s = self._logged_s = now
            count = "" if self._expected is None else f" about {self._expected}"
            log.info("compiling%s kernels, which takes about half a minute: %s", count, self._kept)
        elif now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            count = "" if self._expected is None else f" of about {max(self._expected, num_compiled)}"
            log.info("compiled %d%s kernels in %.0f s", num_compiled, count, now - self._began_s)
        self._num_compiled = num_compiled

    def end(self) -> None:
        if self._num_compiled is not None:
            log.info("compiled %d kernels in %.0f s", self._num_compiled, self._clock() - self._began_s)


@contextmanager
def log_compiling(compiler: KernelCompiler | None) -> Iterator[None]:
    if compiler is None:
        yield
        return
    is_kept, where = compiler.kept()
    notice = CompileNotice(f"once per machine and version, {where}" if is_kept else where, compiler.expected)
    with compiler.reporting(notice):
        yield
    notice.end()
