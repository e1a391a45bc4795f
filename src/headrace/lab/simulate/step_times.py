"""Times of simulated steps: from a `StepLatency`, or measured on a real engine."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.ids import RequestId
from headrace.core.plan import Plan
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.strict_decode import decode, plain, read_json_object
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.policy.placement.roofline import StepLatency

MAX_ERROR = 0.2
"""Mean relative error from which on a warning is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLatency:
    """context_s    per decoding sequence and token before it
    prompt_s     per prompt token
    attention_s  per prompt token and token before it
    """

    step_s: float
    row_s: float
    context_s: float
    prompt_s: float
    attention_s: float

    def prefill_s(self, num_tokens: int, context: int = 0) -> float:
        return self.step_s + num_tokens * (self.prompt_s + self.attention_s * (context + num_tokens / 2))

    def decode_s(self, num_sequences: float, context: float) -> float:
        return self.step_s + num_sequences * (self.row_s + self.context_s * context)


def step_s(latency: StepLatency, plan: Plan) -> float:
    num_rows, num_tokens = plan.num_rows, plan.num_tokens
    if not num_rows:
        return 0.0
    if num_rows == num_tokens:
        return latency.decode_s(num_rows, sum(plan.starts) / num_rows)
    prompts = [(count, start) for count, start in zip(plan.counts, plan.starts, strict=True) if count > 1]
    prompt_tokens = sum(count for count, _ in prompts)
    mean_start = sum(count * start for count, start in prompts) / prompt_tokens
    context = sum(plan.starts) - sum(start for _, start in prompts)
    return _step_s(latency, num_rows - len(prompts), context, prompt_tokens, int(mean_start))


def _step_s(latency: StepLatency, num_decoding: int, context: int, prompt_tokens: int, start: int) -> float:
    """Prompts beside decoding sequences cost the difference to a step without them."""
    decode_s = latency.decode_s(num_decoding, context / num_decoding) if num_decoding else 0.0
    if not prompt_tokens:
        return decode_s
    if not num_decoding:
        return latency.prefill_s(prompt_tokens, start)
    return decode_s + max(0.0, latency.prefill_s(num_decoding + prompt_tokens, start) - latency.prefill_s(num_decoding, start))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """prompt_tokens, attention  and the sum over them of the tokens before each"""

    num_decoding: int
    context: int
    prompt_tokens: int
    attention: float
    seconds: float

    @classmethod
    def of(cls, plan: Plan, seconds: float) -> MeasuredStep:
        prompts = [(count, start) for count, start in zip(plan.counts, plan.starts, strict=True) if count > 1]
        prompt_tokens = sum(count for count, _ in prompts)
        attention = sum(count * (start + count / 2) for count, start in prompts)
        context = sum(plan.starts) - sum(start for _, start in prompts)
        return cls(plan.num_rows - len(prompts), context, prompt_tokens, attention, seconds)


def fit(steps: Sequence[MeasuredStep]) -> FittedLatency:
    """Least squares of relative errors. Raises ValueError for too few steps."""
    if len(steps) < 2 * len(fields(FittedLatency)):
        raise ValueError(f"{len(steps)} steps are too few to fit {len(fields(FittedLatency))} numbers")
    rows = [[1.0, each.num_decoding, each.context, each.prompt_tokens, each.attention] for each in steps]
    values = _non_negative([[value / each.seconds for value in row] for row, each in zip(rows, steps, strict=True)])
    return FittedLatency(step_s=values[0], row_s=values[1], context_s=values[2], prompt_s=values[3], attention_s=values[4])


def _non_negative(rows: Sequence[Sequence[float]]) -> list[float]:
    """The x >= 0 that minimizes the sum of (row x - 1)^2, by coordinate descent on the normal equations."""
    size = len(rows[0])
    scales = [max(abs(row[place]) for row in rows) or 1.0 for place in range(size)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    products = [[sum(row[one] * row[other] for row in scaled) for other in range(size)] for one in range(size)]
    goals = [sum(row[place] for row in scaled) for place in range(size)]
    values = [0.0] * size
    for _ in range(2000):
        for place in range(size):
            if products[place][place] > 0:
                rest = sum(products[place][other] * values[other] for other in range(size) if other != place)
                values[place] = max(0.0, (goals[place] - rest) / products[place][place])
    return [value / scale for value, scale in zip(values, scales, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """engine      options of the measured engine
    error       mean relative error of the fit
    """

    engine: EngineConfig
    latency: FittedLatency
    num_blocks: int
    num_steps: int
    error: float

    @property
    def warning(self) -> str:
        if self.error <= MAX_ERROR:
            return ""
        return (
            f"the fit is off by {self.error:.0%} in the mean: steps of one size took very different times, so that a simulation with it "
            "says little. Measure again while nothing else runs on this machine."
        )


def mean_error(latency: StepLatency, steps: Sequence[MeasuredStep]) -> float:
    return sum(abs(_fitted(latency, each) / each.seconds - 1) for each in steps) / len(steps)


def _fitted(latency: StepLatency, step: MeasuredStep) -> float:
    start = step.attention / step.prompt_tokens - step.prompt_tokens / 2 if step.prompt_tokens else 0.0
    return _step_s(latency, step.num_decoding, step.context, step.prompt_tokens, max(0, round(start)))


def write_steps(file: Path, steps: StepFile) -> None:
    file.write_text(json.dumps(plain(steps), indent=1) + "\n", encoding="utf-8")


def read_steps(file: Path) -> StepFile:
    """Raises ConfigError."""
    data = read_json_object(file)
    try:
        steps = decode(StepFile, data)
        steps = replace(steps, engine=steps.engine.checked())
    except ConfigError as error:
        raise error.at(f"{file}: {error.where}") from None
    for item in fields(steps.latency):
        value = getattr(steps.latency, item.name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{file}: latency.{item.name}", f"must be a number of seconds, 0 or more, got {value}")
    if steps.latency.step_s + steps.latency.row_s <= 0:
        raise ConfigError(f"{file}: latency", "says that a step takes no time")
    if not 0 <= steps.error < math.inf:
        raise ConfigError(f"{file}: error", f"must be a share, 0 or more, got {steps.error}")
    if steps.num_blocks < 2:
        raise ConfigError(f"{file}: num_blocks", f"must be 2 or more, got {steps.num_blocks}")
    return steps


NUM_OUTPUTS = 12

SHARES = (0.02, 0.1, 0.4)
"""Prompt lengths as shares of the longest context."""

MAX_BATCH_TOKENS = 16_384
"""More prompt tokens would take minutes, and say nothing new."""


def measure_steps(engine: Engine, *, limit_s: float, seed: int = 0, clock: Clock = time.perf_counter) -> list[MeasuredStep]:
    """The last prompt of a batch arrives while the others decode.

    engine  of depth 1: one turn is one step
    """
    measured: list[MeasuredStep] = []
    until = clock() + limit_s
    for number, (shape, size) in enumerate(_batches(engine)):
        if clock() >= until:
            break
        _run(engine, shape, size, seed + 2 * number, clock)  # what is compiled or touched for the first time is not measured
        measured += _typical(_run(engine, shape, size, seed + 2 * number + 1, clock))
    return measured


def _typical(steps: Sequence[MeasuredStep]) -> Iterator[MeasuredStep]:
    """Decode steps of one size are replaced by their median."""
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
