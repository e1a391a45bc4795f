"""Measures the steps of a real engine one by one, so that a simulation can use the times of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from headrace.core.clock import Clock
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.engine.loop import Engine
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.simulate.step_times import MeasuredStep

NUM_OUTPUTS = 12
"""Tokens that each measured sequence generates."""

SHARES = (0.02, 0.1, 0.4)
"""Lengths of measured prompts, as shares of the longest context."""

MAX_BATCH_TOKENS = 16_384
"""Most prompt tokens of one measured batch: more would take minutes, and say nothing new."""


def measure_steps(engine: Engine, *, limit_s: float, seed: int = 0, clock: Clock = time.perf_counter) -> list[MeasuredStep]:
    """Measure steps of batches of 1, 2, 4, ... sequences with prompts of several lengths, for `limit_s` seconds or until all are measured.

    The last prompt of a batch arrives while the others decode, so that steps with both are measured too.

    engine  of depth 1, with an outbox that accepts everything, so that one turn is one step
    """
    found: list[MeasuredStep] = []
    until = clock() + limit_s
    for number, (shape, size) in enumerate(_batches(engine)):
        if clock() >= until:
            break
        _run(engine, shape, size, seed + 2 * number, clock)  # what is compiled or touched for the first time is not measured
        found += _typical(_run(engine, shape, size, seed + 2 * number + 1, clock))
    return found


def _typical(steps: Sequence[MeasuredStep]) -> Iterator[MeasuredStep]:
    """The steps of one batch. Decode steps of one size are replaced by their median: some may have been interrupted."""
    decoding: dict[int, list[MeasuredStep]] = {}
    for step in steps:
        if step.prompt_tokens:
            yield step
        else:
            decoding.setdefault(step.num_decoding, []).append(step)
    for same in decoding.values():
        yield sorted(same, key=lambda step: step.seconds)[len(same) // 2]


def _batches(engine: Engine) -> Iterator[tuple[WorkloadShape, int]]:
    """(shape of the requests, batch size), small batches first."""
    info, most = engine.info, engine.scheduler.config.max_num_seqs
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < most] + [most]
    high = info.vocab_size
    for size in sizes:
        for share in SHARES:
            length = max(2, int(share * info.max_model_len))
            if length * size <= MAX_BATCH_TOKENS and length + NUM_OUTPUTS <= info.max_model_len:
                yield WorkloadShape(input_tokens=length, output_tokens=NUM_OUTPUTS, low_id=min(300, high // 2), high_id=high), size


def _run(engine: Engine, shape: WorkloadShape, size: int, seed: int, clock: Clock) -> list[MeasuredStep]:
    requests = [
        EngineRequest(
            request_id=RequestId(f"{seed}.{number}"),
            prompt_ids=request.prompt_ids,
            params=SamplingParams(seed=0, temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True),
        )
        for number, request in enumerate(make_requests(size, shape, seed=seed))
    ]
    late = requests.pop() if size > 1 else None
    for request in requests:
        engine.submit(request)
    steps: list[MeasuredStep] = []
    while True:
        if late is not None and steps and not steps[-1].prompt_tokens:
            engine.submit(late)
            late = None
        began = clock()
        did_work = engine.turn()
        seconds = clock() - began
        if not did_work:
            return steps
        plan = engine.last_plan
        if plan is not None and plan.num_rows:
            steps.append(MeasuredStep.of(plan, seconds))
