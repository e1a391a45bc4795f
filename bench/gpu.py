"""Checks the engine's answers on a GPU, and measures how near its steps are to the memory's and the products' rates. Run by `make gpu`.

    python -m bench.gpu [--device cuda] [--seconds 200] [--formats none,fp8,int4] [--output FILE] [--tiny]

Weights are random, of the shape of Llama-3-8B; prompts are random; 512 tokens in and 128 out. Parts run one after the other until the
seconds are spent, and what was left out is said.

ceilings   read bandwidth of the memory, product rates of bfloat16 and FP8: what the rest is a share of
answers    tokens of the device's runner with its kernels equal those of the plain runner with the reference kernels, in float32
decode     for each format, tokens per second and MBU of decode steps at 1, 8, 32, 128 and 256 streams
prefill    8 prompts of 2,048 tokens: tokens per second, and the share of the product rate
churn      256 streams of a 1B shape with arrivals and cancels, against the same work at the rates of steps without either

MBU: (bytes of the weights + bytes of the KV cache that a step reads) / time of a step / read bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.tinyllama import CONFIG as TINYLLAMA
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.engine.build import build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.environment import environment
from headrace.lab.offline import Collector, OfflineRun, decode_speed, run_offline
from headrace.lab.report import write_json
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import DeviceAdapter, StepAdapters
from headrace.tensor.kernels import LowRankUpdate
from headrace.tensor.launches import CudaLaunches
from headrace.tensor.models import describe

LLAMA_8B = {
    **TINYLLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}
LLAMA_1B = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
TINY = {
    **TINYLLAMA,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
}
STREAMS = (1, 8, 32, 128, 256)
PREFILL = (8, 2048)
"""Prompts, and tokens of each."""
PRODUCT = 8192
"""Rows, inputs and outputs of the product whose rate is the ceiling."""
READ_BYTES = 2 << 30


@dataclass(slots=True)
class Report:
    """What was measured: rows for people, values for programs. deadline_s: seconds of perf_counter after which no part begins."""

    deadline_s: float
    rows: list[str] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    failed: bool = False
    output: Path | None = None

    def row(self, text: str) -> None:
        self.rows.append(text)
        print(text, flush=True)

    def part(self, name: str, run: Callable[[], None], *, least_s: float = 5.0) -> None:
        """Run a part. One that raises fails the whole, and the next one runs all the same."""
        if time.perf_counter() + least_s > self.deadline_s:
            self.row(f"{name}: left out, the time is spent")
            return
        began = time.perf_counter()
        try:
            run()
        except Exception as error:  # the parts after it are worth their minutes
            self.failed = True
            self.row(f"{name}: FAILED, {type(error).__name__}: {error!s:.400}")
            traceback.print_exc()
        print(f"  ({name}: {time.perf_counter() - began:.1f} s)", flush=True)
        gc.collect()  # an engine's memory is given back by a collection alone
        self.write()

    def write(self) -> None:
        """Write what is known so far: a later part may be killed."""
        if self.output is not None:
            write_json(self.output, {"rows": self.rows, "values": self.values, "environment": environment()})


def milliseconds(run: Callable[[], object], *, repeats: int = 10) -> float:
    """Median of the device's own times of a call."""
    run()
    torch.cuda.synchronize()
    make_event: Any = torch.cuda.Event
    pairs = [(make_event(enable_timing=True), make_event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs))


def ceilings(report: Report) -> None:
    """Fill in `read_gbps`, `bf16_tflops` and, where the GPU has it, `fp8_tflops`."""
    memory = torch.empty(READ_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    report.values["read_gbps"] = READ_BYTES / milliseconds(lambda: memory.sum()) / 1e6
    flops = 2 * PRODUCT**3
    x, weight = (torch.randn(PRODUCT, PRODUCT, device="cuda").to(torch.bfloat16) for _ in range(2))
    report.values["bf16_tflops"] = flops / milliseconds(lambda: F.linear(x, weight)) / 1e9
    if torch.cuda.get_device_capability() >= (8, 9):
        report.values["fp8_tflops"] = flops / milliseconds(_fp8_product(x, weight)) / 1e9
    report.row("ceilings: " + ", ".join(f"{name} {value:,.0f}" for name, value in report.values.items() if isinstance(value, float)))


def _fp8_product(x: Tensor, weight: Tensor) -> Callable[[], object]:
    ones = torch.ones(PRODUCT, 1, device="cuda")
    small, other = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    return lambda: torch._scaled_mm(small, other.t(), ones, ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True)


def write_folder(folder: Path, config: dict[str, object]) -> str:
    """A model folder with a config alone: engines that are turned here need no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def shape_of(inputs: int, outputs: int, spread: float = 0.0) -> WorkloadShape:
    return WorkloadShape(input_tokens=inputs, output_tokens=outputs, spread=spread)


def answers(report: Report, folder: Path, device: str) -> None:
    """Greedy tokens in float32, through chunked prefill and prefix hits, of both runners. Raises AssertionError where they differ."""
    model = write_folder(folder / "answers", {**TINY, "torch_dtype": "float32", "num_hidden_layers": 4})
    requests = [*make_requests(6, shape_of(200, 40, 0.5), seed=1), *make_requests(6, shape_of(200, 40, 0.5), seed=1)]
    found = []
    for options in ({"device": device}, {"device": device, "kernels": "reference", "depth": 1}):
        engine, tokens = engine_with_tokens(EngineConfig(model=model, load_format="dummy", max_num_batched_tokens=96, max_num_seqs=8,
                                                         num_kv_blocks=400, **options).checked())  # fmt: skip
        for number, request in enumerate(requests):
            engine.submit(greedy(str(number), request.prompt_ids, request.output_tokens))
        turn_until_idle(engine)
        found.append([tokens[str(number)] for number in range(len(requests))])
        engine.closing.close()
    equal = sum(mine == theirs for mine, theirs in zip(*found, strict=True))
    report.values["answers_equal"] = [equal, len(requests)]
    report.row(f"answers: {equal} of {len(requests)} equal the plain runner's with reference kernels")
    assert equal == len(requests), "answers differ"


def engine_with_tokens(config: EngineConfig) -> tuple[Engine, dict[str, list[int]]]:
    tokens: dict[str, list[int]] = {}

    def outbox(updates: Sequence[object]) -> None:
        for update in updates:
            tokens.setdefault(str(getattr(update, "request_id", "")), []).extend(getattr(update, "token_ids", ()))

    return build_engine(config.checked(), outbox), tokens


def greedy(name: str, prompt_ids: Sequence[int], max_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=RequestId(name), prompt_ids=tuple(prompt_ids), params=params)


def turn_until_idle(engine: Engine) -> None:
    while engine.turn():
        pass


def decode_and_prefill(report: Report, model: str, device: str, quantization: str, streams: Sequence[int], tokens: tuple[int, int]) -> None:
    """Rows `decode` and `prefill` of one format."""
    collector = Collector()
    began = time.perf_counter()
    engine = build_engine(_config(model, device, quantization, max(streams)), collector)
    loaded_s = time.perf_counter() - began
    bandwidth = report.values.get("read_gbps")
    found: dict[str, object] = {"start_s": loaded_s}
    cells = []
    try:
        for count in streams:
            run = run_offline(engine, collector, make_requests(count, shape_of(*tokens), seed=count))
            speed = decode_speed(engine.info, run, bandwidth * 1e9 if isinstance(bandwidth, float) else None)
            assert speed is not None, "the streams never decoded together"
            found[f"decode_{count}"] = {"tok_s": count / speed.step_s, "step_ms": 1000 * speed.step_s, "mbu": speed.mbu}
            whole = run.output_tokens / run.duration_s
            cells.append(
                f"{count}: {count / speed.step_s:,.0f} tok/s" + (f" {speed.mbu:.0%}" if speed.mbu else "") + f" (run {whole:,.0f})"
            )
        found["prefill_tok_s"] = prefill = _prefill_rate(run_offline(engine, collector, make_requests(PREFILL[0], _prompt(tokens), seed=9)))
    finally:
        engine.closing.close()
    rate = report.values.get("fp8_tflops" if quantization == "fp8" else "bf16_tflops")
    if isinstance(rate, float):
        found["prefill_share"] = 2 * _multiplied(model) * prefill / rate / 1e12
    report.values[quantization] = found
    report.row(f"{quantization} (start {loaded_s:.0f} s): " + " | ".join(cells) + f" | prefill {prefill:,.0f} tok/s")


def _config(model: str, device: str, quantization: str, num_seqs: int) -> EngineConfig:
    return EngineConfig(model=model, load_format="dummy", quantization=quantization, device=device, max_num_seqs=num_seqs,
                        max_model_len=4096 if device == "cuda" else None, enable_prefix_caching=False).checked()  # fmt: skip


def _multiplied(model: str) -> int:
    """Weights that every token of a prompt is multiplied with: all but the embedding's and the head's, which are not tied here."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    outside = 2 * int(config["vocab_size"]) * int(config["hidden_size"])
    return describe(Path(model), max_model_len=None).num_parameters - outside


def _prompt(tokens: tuple[int, int]) -> WorkloadShape:
    return shape_of(PREFILL[1] if tokens[0] > 64 else 64, 1)


def _prefill_rate(run: OfflineRun) -> float:
    return run.prompt_tokens / run.duration_s


def adapters(report: Report) -> None:
    """What the adapters of 32 rows add to a decode step of an 8B shape, alone in a graph: rank 16 of every linear, in bfloat16."""
    kernels = load_backend("triton").adapters
    assert kernels is not None
    hidden, heads, inner, layers = 4096, 1024, 14336, 32  # of LLAMA_8B
    shapes = [(hidden, (hidden, heads, heads)), (hidden, (hidden,)), (hidden, (inner, inner)), (inner, (hidden,))]
    shapes *= layers

    def update(inputs: int, rows: int, first_row: int) -> LowRankUpdate:
        down, up = torch.zeros(16, inputs).to(torch.bfloat16), torch.zeros(rows, 16).to(torch.bfloat16)
        return LowRankUpdate(down=down, up=up, scale=1.0, first_row=first_row)

    linears = [[update(inputs, rows, sum(parts[:place])) for place, rows in enumerate(parts)] for inputs, parts in shapes]
    held = [kernels.pack(linears) for _ in range(20)]
    x = {inputs: torch.ones(32, inputs, device="cuda", dtype=torch.bfloat16) for inputs in (hidden, inner)}
    y = {sum(parts): torch.zeros(32, sum(parts), device="cuda", dtype=torch.bfloat16) for _, parts in shapes}
    addresses = torch.tensor([0, *(each.address for each in held if isinstance(each, DeviceAdapter))], device="cuda")
    found = {}
    for count in (4, 20):
        slots = torch.arange(32, dtype=torch.int32, device="cuda") % count + 1

        def step(slots: Tensor = slots) -> None:
            adapters = StepAdapters(slots, (None, *held), addresses=addresses, max_rank=16)
            for number, (inputs, parts) in enumerate(shapes):
                kernels.apply(y[sum(parts)], x[inputs], number, adapters)

        found[str(count)] = {"ms": milliseconds(CudaLaunches().capture(step)), "bytes": count * held[0].num_bytes}
    report.values["adapters"] = found
    report.row("adapters of 32 rows, rank 16, alone: " + ", ".join(f"{count}: {each['ms']:.2f} ms" for count, each in found.items()))


def churn(report: Report, model: str, device: str, num_seqs: int, num_requests: int) -> None:
    """Requests that arrive as others end, a third of them cancelled on their way: their time against that of the same work without either.

    The same work is what was computed: prompt tokens at the prefill's rate, output tokens at the rate of steps with all streams.
    """
    collector = Collector()
    engine = build_engine(_config(model, device, "none", num_seqs), collector)
    try:
        steady = run_offline(engine, collector, make_requests(num_seqs, shape_of(128, 128), seed=1))
        speed = decode_speed(engine.info, steady, None)
        assert speed is not None, "the streams never decoded together"
        prefill_s = 1 / _prefill_rate(run_offline(engine, collector, make_requests(num_seqs, shape_of(256, 1), seed=2)))
        took, prompts, outputs = _churned(engine, collector, num_seqs, num_requests)
    finally:
        engine.closing.close()
    ideal = prompts * prefill_s + outputs * speed.step_s / num_seqs
    report.values["churn"] = {"share_of_steady": ideal / took, "tok_s": outputs / took, "steady_tok_s": num_seqs / speed.step_s}
    report.row(f"churn, {num_seqs} streams: {outputs / took:,.0f} tok/s, {ideal / took:.0%} of the same work without arrivals and cancels")


def _churned(engine: Engine, collector: Collector, num_seqs: int, num_requests: int) -> tuple[float, int, int]:
    """(seconds, prompt tokens, output tokens) of requests that come whenever fewer than `num_seqs` are here."""
    draw = random.Random(3)
    requests = make_requests(num_requests, shape_of(128, 128, 0.8), seed=4)
    collector.begin(num_requests)
    cancel_at: dict[int, list[int]] = {}
    began, sent, turns = time.perf_counter(), 0, 0
    while collector.num_ended < num_requests:
        while sent < num_requests and sent - collector.num_ended < num_seqs:
            engine.submit(greedy(str(sent), requests[sent].prompt_ids, requests[sent].output_tokens))
            if draw.random() < 1 / 3:
                cancel_at.setdefault(turns + draw.randint(5, 100), []).append(sent)
            sent += 1
        for number in cancel_at.pop(turns, ()):
            engine.cancel(RequestId(str(number)))
        engine.turn()
        turns += 1
    took = time.perf_counter() - began
    records = [collector.record(number, len(request.prompt_ids), began, began) for number, request in enumerate(requests)]
    return took, sum(record.prompt_tokens for record in records if record.output_tokens), sum(record.output_tokens for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--formats", default="none,fp8,int4")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try this program where there is no GPU")
    given = parser.parse_args()
    report = Report(time.perf_counter() + given.seconds, output=given.output)
    big, small, streams, tokens = (TINY, TINY, (1, 4), (16, 8)) if given.tiny else (LLAMA_8B, LLAMA_1B, STREAMS, (512, 128))
    with tempfile.TemporaryDirectory(prefix="hr-gpu-") as name:
        folder = Path(name)
        if given.device == "cuda":
            report.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
            report.part("ceilings", lambda: ceilings(report))
            report.part("adapters", lambda: adapters(report))
        report.part("answers", lambda: answers(report, folder, given.device))
        model = write_folder(folder / "big", big)
        for quantization in given.formats.split(","):
            run = partial(decode_and_prefill, report, model, given.device, quantization, streams, tokens)
            report.part(quantization, run, least_s=1 if given.tiny else 30)
        sizes = (4, 12) if given.tiny else (256, 1500)
        other = write_folder(folder / "small", small)
        report.part("churn", lambda: churn(report, other, given.device, *sizes), least_s=1 if given.tiny else 20)
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
