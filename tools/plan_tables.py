"""Writes the tables of the planning pages, as the planner computes them: `python -m tools.plan_tables`.

A place is `<!-- plan: NAME -->` ... `<!-- end -->`. tests/tools/test_plan_tables.py fails where a page has another table than this gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median

from headrace.cli.bench.common import make_shape
from headrace.engine.config import EngineConfig
from headrace.lab.metrics import LoadRecord, summarize
from headrace.lab.plan.catalogue import Catalogue, read_catalogue
from headrace.lab.plan.plan import dollars_per_1m_tokens
from headrace.lab.plan.shapes import find_entry
from headrace.lab.simulate.build import on_device, planned_model
from headrace.lab.simulate.load import drawn
from headrace.lab.simulate.site import SimulatedSite
from headrace.policy.placement.layout import Placement, choose_layout, judge
from headrace.policy.placement.load import at_rate, step_tokens
from headrace.policy.placement.need import Goals, Need, Traffic
from headrace.policy.placement.roofline import LOAD_BYTES_PER_S, Layout, Roofline, load_seconds
from tools.plan_claims import findings
from tools.plan_claims import rule as rule_rows
from tools.plan_sizings import Sizing, fleet, known_sizings, levers, resident, routing_saving, shape, standby_replicas

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(ROOT / "docs" / name for name in ("planning.md", "simulation.md", "sizings.md", "cost.md", "choosing.md", "hardware.md"))

PLACE = re.compile(r"(<!-- plan: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

MATRIX_MODELS = ("mistral-7b", "qwen2.5-32b", "llama-3-70b", "mixtral-8x7b", "llama-3-405b")
MATRIX_DEVICES = ("rtx4090", "l40s", "a100", "h100", "h200")

RECORD = ROOT / "bench" / "results" / "nvidia-h100-80gb" / "gpu.json"
"""An 8B model on one H100: decode steps of contexts of 512 to 640 tokens, and prompts of 2,048."""

SUMS = ROOT / "bench" / "results" / "amd-epyc-26-2-avx512_bf16-vnni-2cpus" / "all-reduce.json"
"""Sums of float32 over two processes of one thread, each bound to a core of the same memory domain."""

RECORDED = {"none": "bf16", "fp8": "fp8", "int4": "int4"}
"""The record's name of a quantization -> dtype."""


ANSWER = 200
"""Tokens of an answer of the design loads."""

A_DAY = 1e6 / 86_400
LOADS = (
    ("1,000 requests/s of 70B", "llama-70b", 1000.0, 1000.0),
    ("1M requests a day of 70B, peak 3 x the mean", "llama-70b", 3 * A_DAY, A_DAY),
    ("1M requests a day of 8B, peak 3 x the mean", "llama-3-8b", 3 * A_DAY, A_DAY),
)
"""Name, model, and requests per second: at the peak, for which devices are there, and in the mean, which pays for them."""

BESIDE = (("llama-70b", "h100", 4, 2048, 238), ("llama-3-8b", "l40s", 1, 4096, 52), ("mixtral-8x7b", "a100", 2, 8192, 51))
"""model, device, TP, context, and the sequences that llm-d-planner 0.3.3 gives (`max_concurrent_requests`, utilization 0.9, bf16)."""


def beside(catalogue: Catalogue) -> Iterator[str]:
    yield "| sequences at once, bf16, memory fraction 0.9 | llm-d-planner | headrace plan |"
    yield "|---|---|---|"
    for name, device, tp, context, theirs in BESIDE:
        ours = resident(catalogue, name, device, tp, context, memory_fraction=0.9)[1]
        yield f"| {name} on {tp} x {device}, {context} tokens each | {theirs} | {ours} |"


QUOTED = (("vLLM", 2000, 50, 100), ("TensorRT-LLM", 2500, 40, 120), ("TGI", 1500, 80, 80))
"""Engine, tokens/s, ms, and sequences at once, as they are quoted of LLaMA-7B on one A100; of what the ms are is not said."""


def quoted(catalogue: Catalogue) -> Iterator[str]:
    ours = "TPOT at 512 tokens | tokens/s | tokens each that fit"
    yield f"| LLaMA-7B, one A100, as quoted | tokens/s | ms | sequences | sequences / ms | {ours} |"
    yield "|---" * 8 + "|"
    latency = Roofline(shape(catalogue, "llama-2-7b"), catalogue.device("a100"), Layout(), "fp16", "fp16")
    tokens = resident(catalogue, "llama-2-7b", "a100", 1, 512, memory_fraction=0.9)[0]
    for engine, rate, milliseconds, sequences in QUOTED:
        seconds = latency.decode_s(sequences, 512)
        said = f"{rate:,} | {milliseconds} | {sequences} | {1000 * sequences / milliseconds:,.0f} tokens/s"
        yield f"| {engine} | {said} | {seconds * 1e3:.1f} ms | {sequences / seconds:,.0f} | {tokens // sequences:,} |"


SIMULATED = (
    ("llama-3-8b", "h100", "bf16"),
    ("mistral-7b", "l40s", "bf16"),
    ("qwen2.5-32b", "h200", "bf16"),
    ("mixtral-8x7b", "h200", "fp8"),
    ("llama-70b", "b200", "fp8"),
)
"""Model, device and dtype of weights."""

SHARES = (0.2, 0.5, 0.8)
"""Loads, as shares of the planned capacity."""


def beside_simulate(catalogue: Catalogue) -> Iterator[str]:
    yield "| model, device | requests/s | TPOT planned, ms | simulated | TTFT planned, ms | simulated |"
    yield "|---|---|---|---|---|---|"
    for name, device, dtype in SIMULATED:
        traffic = Traffic(prompt_tokens=512, output_tokens=128, counts_prompts=True)
        need = Need(
            model=shape(catalogue, name),
            device=catalogue.device(device),
            dtype=dtype,
            kv_dtype="bf16",
            traffic=traffic,
            goals=Goals(tpot_s=0.05),
            memory_fraction=0.9,
        )
        judged, latency = judge(need, Layout()), Roofline(need.model, need.device, Layout(), dtype, "bf16")
        for share in SHARES:
            rate = share * judged.full_tokens_per_s
            load = at_rate(need, latency, rate, judged.load.running)
            found = summarize(simulate(need, judged, rate, num_requests=400, seed=0))
            tpot = f"{load.tpot_s * 1e3:.1f} | {found.tpot_s.mean * 1e3:.1f}"
            ttft = f"{load.ttft_s * 1e3:.0f} | {found.ttft_s.mean * 1e3:.0f}"
            yield f"| {name}, {dtype}, {device} | {rate / traffic.output_tokens:.1f} | {tpot} | {ttft} |"


def simulate(need: Need, judged: Placement, tokens_per_s: float, *, num_requests: int, seed: int) -> list[LoadRecord]:
    """Simulate one replica of a planned layout, with the limits of the plan, under a load of equal lengths at random moments."""
    traffic = need.traffic
    limits = {"max_num_seqs": judged.max_num_seqs, "max_num_batched_tokens": max(step_tokens(need), judged.max_num_seqs)}
    engine = on_device(EngineConfig(model=need.model.name, **limits), tuple(limits), need.device.name)  # type: ignore[arg-type]
    model, _ = planned_model(engine, need, judged.layout.tp)
    lengths = make_shape("random", traffic.prompt_tokens, traffic.output_tokens, 0.0, 0, 1, 2000)
    rate = tokens_per_s / traffic.output_tokens
    return SimulatedSite([model], seed=seed).run(drawn(rate, num_requests / rate, lengths, seed=seed, spike=None))


def measured() -> Iterator[tuple[str, int, float]]:
    """dtype, streams (0: prompts), tokens/s of the record."""
    values = json.loads(RECORD.read_text(encoding="utf-8"))["values"]
    for name, dtype in RECORDED.items():
        for key, value in values[name].items():
            if key.startswith("decode_"):
                yield dtype, int(key.removeprefix("decode_")), value["tok_s"]
        yield dtype, 0, values[name]["prefill_tok_s"]


def fit(catalogue: Catalogue) -> Iterator[str]:
    yield "| weights | streams | measured tokens/s | planned | planned / measured |"
    yield "|---|---|---|---|---|"
    model, device = shape(catalogue, "llama-3-8b"), catalogue.device("h100")
    for dtype, streams, rate in measured():
        latency = Roofline(model, device, Layout(), dtype, "bf16")
        planned = streams / latency.decode_s(streams, 576) if streams else 2048 / latency.prefill_busy_s(2048)
        yield f"| {dtype} | {streams or 'prefill of 2,048'} | {rate:,.0f} | {planned:,.0f} | {planned / rate:.2f} |"


def measured_sums() -> Iterator[tuple[int, float]]:
    """Bytes of one sum over two ranks, and the median of its seconds."""
    for entry in json.loads(SUMS.read_text(encoding="utf-8"))["entries"]:
        yield entry["bytes"], median(entry["seconds"])


def fit_link(sums: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of two ranks, by least squares of relative errors. sums: (bytes, seconds)

    With weights 1 / seconds, the sum of (latency / seconds + bytes / rate / seconds - 1)^2 is least: two linear equations.
    """
    rows = [(1 / seconds, num_bytes / seconds) for num_bytes, seconds in sums]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    return (a * bb - b * ab) / determinant, determinant / (aa * b - ab * a)


def sums(catalogue: Catalogue) -> Iterator[str]:
    link = catalogue.device("cpu").link
    yield "| bytes of a sum | measured, us | planned, us | planned / measured |"
    yield "|---|---|---|---|"
    for num_bytes, seconds in [*measured_sums()][::2]:
        planned = link.all_reduce_s(2, num_bytes)
        yield f"| {num_bytes:,} | {seconds * 1e6:,.1f} | {planned * 1e6:,.1f} | {planned / seconds:.2f} |"


def links(catalogue: Catalogue) -> Iterator[str]:
    yield "| link | GB/s | latency, us | devices | source |"
    yield "|---|---|---|---|---|"
    found = {link.name: link for device in catalogue.devices.values() for link in (device.link, device.network)}
    for name, link in found.items():
        yield f"| {name} | {link.bytes_per_s / 1e9:g} | {link.latency_s * 1e6:g} | {link.num_devices:,} | {link.source} |"


def sizings(catalogue: Catalogue) -> Iterator[str]:
    return sizing_rows(known_sizings(catalogue))


def rule(catalogue: Catalogue) -> Iterator[str]:
    return sizing_rows(rule_rows(catalogue))


def sizing_rows(rows: Iterable[Sizing]) -> Iterator[str]:
    yield "| question | often said | the planner | from |"
    yield "|---|---|---|---|"
    for each in rows:
        yield f"| {each.question} | {each.said} | {each.found} | {each.how} |"


def claims(catalogue: Catalogue) -> Iterator[str]:
    yield "| claim | assumed | decoding alone | prompts counted | holds |"
    yield "|---|---|---|---|---|"
    for each in findings(catalogue):
        yield f"| {each.claim.text} | {each.case} | {each.decoding:,.0f} | {each.counted:,.0f} | {each.verdict} |"


STARTS = (("llama-3-8b", "fp16"), ("llama-70b", "fp16"), ("llama-3-405b", "fp8"))


def start(catalogue: Catalogue) -> Iterator[str]:
    rates = (LOAD_BYTES_PER_S, 3e9, 14e9)
    yield "| cold start, weights | " + " | ".join(f"{rate / 1e9:g} GB/s" for rate in rates) + " |"
    yield "|---" * (len(rates) + 1) + "|"
    for name, dtype in STARTS:
        weights = shape(catalogue, name).weights_bytes(dtype)
        cells = " | ".join(f"{load_seconds(weights, rate):.0f} s" for rate in rates)
        yield f"| {name}, {dtype}, {weights / 1e9:,.0f} GB | {cells} |"


def matrix(catalogue: Catalogue) -> Iterator[str]:
    yield "| bf16, 200 users at 20 tokens/s, 4K context | " + " | ".join(MATRIX_DEVICES) + " |"
    yield "|---" * (len(MATRIX_DEVICES) + 1) + "|"
    for name in MATRIX_MODELS:
        cells = []
        for device in MATRIX_DEVICES:
            plan = fleet(catalogue, name, device, context=4096, tokens_per_s=4000, user_tokens_per_s=20, dtype="bf16")
            best = plan.best
            cells.append(best.reason or f"{best.replicas} x {best.layout}, ${best.price_per_hour:.2f}/h, ${plan.cost_per_1m_tokens:.2f}/1M")
        yield f"| {name} | " + " | ".join(cells) + " |"


def devices(catalogue: Catalogue) -> Iterator[str]:
    figures = "memory GB | GB/s | TFLOP/s bf16 | fp8 or int8 | link GB/s"
    yield f"| name | device | {figures} | $/hour | $/month | price from | as of | source | CPU or CUDA |"
    yield "|---" * 13 + "|"
    for name, device in catalogue.devices.items():
        flops = device.flops
        eight = max(flops.get("fp8", 0.0), flops.get("int8", 0.0))
        price = device.price_per_hour
        costs = "- | - | -" if price is None else f"{price:g} | {price * 730:,.0f} | {device.price_source}"
        numbers = f"{device.memory_bytes / 1e9:g} | {device.bytes_per_s / 1e9:,.0f} | {flops['bf16'] / 1e12:,g}"
        rest = f"{f'{eight / 1e12:,g}' if eight else '-'} | {device.link.bytes_per_s / 1e9:g}"
        backend = "yes" if device.is_served else "no"
        yield f"| {name} | {device.title} | {numbers} | {rest} | {costs} | {device.as_of} | {device.source} | {backend} |"


def bill(catalogue: Catalogue) -> Iterator[str]:
    yield "| step | how | factor | bill per month |"
    yield "|---|---|---|---|"
    dollars = 500_000.0
    yield f"| Before | 70B in fp16 on A100, 32 sequences at a time | | ${dollars:,.0f} |"
    for lever in levers(catalogue):
        dollars *= lever.factor
        yield f"| {lever.name} | {lever.how} | {lever.factor:.2f} | ${dollars:,.0f} |"


def loads(catalogue: Catalogue) -> Iterator[str]:
    yield "| load | on | replicas | devices | TPOT | $/hour | $/1M tokens | bandwidth allows |"
    yield "|---|---|---|---|---|---|---|---|"
    for label, name, peak, mean in LOADS:
        plans = [
            fleet(catalogue, name, device.name, context=700, tokens_per_s=peak * ANSWER, output_tokens=ANSWER, tpot_s=0.05)
            for device in catalogue.devices.values()
            if device.price_per_hour is not None and device.is_served
        ]
        for plan in sorted((plan for plan in plans if plan.is_met), key=lambda plan: plan.dollars_per_hour or 0.0)[:2]:
            best, hourly = plan.best, plan.dollars_per_hour or 0.0
            dollars = dollars_per_1m_tokens(hourly, mean * ANSWER) + plan.figures["egress_per_1m_tokens"].value
            replicas = f"{best.replicas} x {best.layout} | {best.num_devices}"
            bound = plan.figures["bandwidth_tokens_per_s"].value / best.capacity_tokens_per_s
            near = f"{bound:.2f} x, {'within' if plan.is_near_bandwidth else 'not within'} 2 x"
            spent = f"${hourly:,.2f} | ${dollars:.2f} | {near}"
            yield f"| {label} | {plan.need.device.name} | {replicas} | {best.load.tpot_s * 1e3:.0f} ms | {spent} |"


def up_or_out(catalogue: Catalogue) -> Iterator[str]:
    yield "| one replica of 70B, 2K context, TPOT goal 50 ms | batch | TPOT | TTFT | tokens/s | tokens/s per device |"
    yield "|---|---|---|---|---|---|"
    for device in ("a100", "h100"):
        need = Need(
            model=find_entry("llama-70b", catalogue.models)[0],
            device=catalogue.device(device),
            dtype="fp16",
            kv_dtype="fp16",
            traffic=Traffic(prompt_tokens=1536, output_tokens=512),
            goals=Goals(tpot_s=0.05),
            num_devices=8,
            compares_all=True,
        )
        for each in sorted(choose_layout(need), key=lambda each: each.layout.num_devices):
            if each.layout.pp == 1 and each.batch:
                rate = each.full_tokens_per_s
                times = f"{each.load.tpot_s * 1e3:.1f} ms | {each.load.ttft_s * 1e3:.0f} ms"
                yield f"| {device}, {each.layout} | {each.batch} | {times} | {rate:,.0f} | {rate / each.layout.num_devices:,.0f} |"


def layouts(catalogue: Catalogue) -> Iterator[str]:
    yield "| layout on H100 | TPOT | tokens/s | per device | all-reduces of a step | their share |"
    yield "|---|---|---|---|---|---|"
    model, device = shape(catalogue, "llama-70b"), catalogue.device("h100")
    for layout in (Layout(2), Layout(4), Layout(8), Layout(2, 2), Layout(4, 2)):
        latency = Roofline(model, device, layout, "fp16", "fp16")
        seconds = latency.decode_s(64, 2048)
        rate = 64 / seconds
        reduces = latency.collectives_s(64 / layout.pp)
        shared = f"{reduces * 1e3:.1f} ms | {reduces / seconds:.0%}"
        yield f"| {layout} | {seconds * 1e3:.1f} ms | {rate:,.0f} | {rate / layout.num_devices:,.0f} | {shared} |"


def routing(catalogue: Catalogue) -> Iterator[str]:
    ratios = (3, 5, 8, 10)
    yield "| tokens by the small model | " + " | ".join(f"{ratio} times cheaper" for ratio in ratios) + " |"
    yield "|---" * (len(ratios) + 1) + "|"
    for share in (0.4, 0.5, 0.6, 0.7, 0.8):
        yield f"| {share:.0%} | " + " | ".join(f"{routing_saving(share, ratio):.0%}" for ratio in ratios) + " |"


def spike(catalogue: Catalogue) -> Iterator[str]:
    yield "| spike to | patience 5 s | 10 s | 30 s | 60 s |"
    yield "|---|---|---|---|---|"
    for times in (1.5, 2, 3, 5):
        cells = [
            str(standby_replicas(requests_per_s=times * 50, replica_requests_per_s=10, running=6, load_s=90, patience_s=patience))
            for patience in (5, 10, 30, 60)
        ]
        yield f"| {times:g} times, {times * 50:g}/s | " + " | ".join(cells) + " |"


TABLES: Mapping[str, Callable[[Catalogue], Iterable[str]]] = {
    "fit": fit,
    "sums": sums,
    "links": links,
    "beside": beside,
    "quoted": quoted,
    "beside simulate": beside_simulate,
    "sizings": sizings,
    "rule": rule,
    "claims": claims,
    "start": start,
    "matrix": matrix,
    "devices": devices,
    "bill": bill,
    "loads": loads,
    "up or out": up_or_out,
    "layouts": layouts,
    "routing": routing,
    "spike": spike,
}


def with_tables(text: str, catalogue: Catalogue) -> str:
    """A page with its tables as they are computed now. Raises KeyError for a place without a table."""
    return PLACE.sub(lambda found: found[1] + "\n".join(TABLES[found[2]](catalogue)) + "\n" + found[3], text)


def main() -> None:
    catalogue = read_catalogue()
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), catalogue), encoding="utf-8")


if __name__ == "__main__":
    main()
