"""Writes docs/peers.md with its plots, and tables.md here, from every cell there is: `python -m bench.peers.report`.

Needs matplotlib for the plots.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.harness import RESULTS
from bench.peers import http
from bench.peers.cells import CEILING_METHOD, ENGINES, METHOD, PRECISIONS, SHAPES, Cell, Outcome, load_all
from bench.peers.rows import DECODE_TOKENS, decode_prompt, row_names

DOCS = RESULTS.parents[1] / "docs"
PAGE = DOCS / "peers.md"
TABLES = Path(__file__).with_name("tables.md")
"""Every figure, a part per machine; the page links to it."""
PEERS = ("llama.cpp", "vllm", "openvino")
ROWS = (*row_names(), "startup", "memory")
LOWER_IS_BETTER = ("startup", "memory")
BITS = {"bf16": 16.0, "int8": 8.0, "int4": 4.25}
"""Bits of a weight as Headrace stores it; int4 carries 16 bits of scale per 64 weights."""
KV_BYTES = 2
"""Bytes of a number in the KV cache; where it is held in float32, MBU is a lower bound."""

Rounds = Mapping[int, Outcome]
Table = Mapping[str, Mapping[str, Rounds]]
"""row -> engine -> round -> outcome."""

HEADER = """# Headrace beside llama.cpp, vLLM and OpenVINO on a CPU

Written by `python -m bench.peers.report` from the cells in `bench/results/peers/`; how they are measured is in
[bench/peers/README.md](../bench/peers/README.md). Headrace over the best other engine of the same round, median over the rounds; more
than 1 is better, **bold** is a loss, "-" was not measured; an asterisk marks cells with a remark below their table in
[bench/peers/tables.md](../bench/peers/tables.md), which has every figure.

%s

## How to read the tables

A cell is the median over its rounds with the smallest and largest in brackets; bad rounds are kept. "/ best peer" is turned so that more
than 1 means Headrace is better; the number of rounds stands behind it; rounds that not every named engine took part in are compared with
those that did; 0 where Headrace failed. "/ ceiling" is Headrace over the model's matrix products alone, asked in turns. `mixed-32` asks
llama.cpp through its server, the others in their own process. MBU: bytes of weights and KV that a step must read, over its time, over the
read bandwidth that `bench/bandwidth.py` gave just before. A cell whose JSON names no `read_bandwidth_pattern` was divided by the rate of
a plain sum: an MBU near or above 1 says that this divisor is too small.

What falls short of Headrace's own goals, which exist for llama-1.1b alone, is **bold**, with the goal behind it. What was tried, and what
the limit is: [experiments.md](experiments.md#short-of-the-goals-on-a-cpu).
"""
TABLES_HEADER = """# Every cell beside llama.cpp, vLLM and OpenVINO

Written by `python -m bench.peers.report`; how to read it is in [docs/peers.md](../../docs/peers.md).
"""
GOALS: Mapping[str, Mapping[str, float]] = {
    "bf16": {"peer": 1.0, "ceiling": 0.92, "mbu": 0.85},
    "int8": {"peer": 1.1, "mbu": 0.8},
    "int4": {"peer": 1.1, "mbu": 0.7},
}
"""Goals of the first shape: over the best peer in every row, over the ceiling, and MBU of one stream."""


def tables() -> dict[str, dict[tuple[str, str], Table]]:
    """Machine -> (shape, precision) -> its table, of the cells on disk; cells of an older method are left out where newer ones exist.

    The ceiling has methods of its own.
    """
    found = list(load_all())

    def key_of(cell: Cell) -> tuple[str, str, str, bool]:
        return cell.machine, cell.shape, cell.precision, cell.engine == "ceiling"

    newest: dict[tuple[str, str, str, bool], int] = defaultdict(int)
    for cell, outcome in found:
        newest[key_of(cell)] = max(newest[key_of(cell)], outcome.method)
    cells: dict[tuple[str, str, str], dict[str, dict[str, dict[int, Outcome]]]]
    cells = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for cell, outcome in found:
        if outcome.method == newest[key_of(cell)]:
            cells[cell.machine, cell.shape, cell.precision][cell.row][cell.engine][cell.round] = outcome
    order = [(shape, precision) for shape in SHAPES for precision in PRECISIONS]
    machines = sorted({machine for machine, _, _ in cells})
    return {machine: {key: cells[machine, *key] for key in order if (machine, *key) in cells} for machine in machines}


def plot_of(machine: str) -> Path:
    return DOCS / f"peers-{machine}.svg"


def advantage(row: str, own: float, other: float) -> float:
    """More than 1: `own` is better."""
    return other / own if row in LOWER_IS_BETTER else own / other


def advantages(row: str, engines: Mapping[str, Rounds], over: tuple[str, ...], own: str = "headrace") -> list[float]:
    """One ratio per round of `own` in which one of `over` has a figure: against the best of them. 0 where `own` failed."""
    ratios = []
    for number, outcome in engines.get(own, {}).items():
        others = [value for engine in over if (value := _value(engines, engine, number)) is not None]
        if others:
            value = outcome.value
            ratios.append(0.0 if value is None else min(advantage(row, value, other) for other in others))
    return ratios


def shares_of_ceiling(row: str, engines: Mapping[str, Rounds]) -> list[float]:
    """Headrace over the ceiling: as measured in turns, 0 where Headrace failed; from before that was done, of the same round."""
    in_turns = [outcome for outcome in engines.get("ceiling", {}).values() if outcome.value and "headrace" in outcome.load]
    shares = [(outcome.load["headrace"] or 0.0) / outcome.value for outcome in in_turns if outcome.value]
    return shares or advantages(row, engines, ("ceiling",))


def _value(engines: Mapping[str, Rounds], engine: str, number: int) -> float | None:
    outcome = engines.get(engine, {}).get(number)
    return outcome.value if outcome else None


def mbu(row: str, precision: str, rounds: Rounds) -> float | None:
    """Model bandwidth utilisation of decode rows: see HEADER. The context is that of the middle of the measured part."""
    kind, _, streams = row.partition("-")
    if kind != "decode":
        return None
    shares = []
    for outcome in rounds.values():
        if outcome.value and outcome.read_bandwidth_bytes_per_s and outcome.facts:
            context = decode_prompt(int(streams)) + DECODE_TOKENS / 2
            kv = int(streams) * context * outcome.facts["kv_numbers_per_token"] * KV_BYTES
            step_bytes = outcome.facts["weights"] * BITS[precision] / 8 + kv
            shares.append(step_bytes * outcome.value / int(streams) / outcome.read_bandwidth_bytes_per_s)
    return statistics.median(shares) if shares else None


def grid(found: Mapping[str, Mapping[tuple[str, str], Table]]) -> Iterator[str]:
    """One line per machine, shape and precision, one column per row: Headrace over the best peer, and whether that is a win or a loss."""
    shown = [row for row in ROWS if any(row in table for tables_of_machine in found.values() for table in tables_of_machine.values())]
    yield "| machine, shape, precision | " + " | ".join(shown) + " |"
    yield "|---" * (len(shown) + 1) + "|"
    wins = losses = single = with_vllm = 0
    days: set[str] = set()
    for machine, tables_of_machine in found.items():
        for (shape, precision), table in tables_of_machine.items():
            ratios = {row: advantages(row, table.get(row, {}), PEERS) for row in shown}
            single += sum(len(each) == 1 for each in ratios.values())
            with_vllm += sum(bool(table[row].get("vllm")) for row in shown if ratios[row])
            outcomes = (outcome for columns in table.values() for rounds in columns.values() for outcome in rounds.values())
            days.update(str(outcome.environment["time"])[:10] for outcome in outcomes)
            medians = {row: statistics.median(each) for row, each in ratios.items() if each}
            wins += sum(is_win(value) for value in medians.values())
            losses += sum(not is_win(value) for value in medians.values())
            line = [_grid_cell(medians[row], table[row]) if row in medians else "-" for row in shown]
            yield f"| [{machine}](../bench/peers/tables.md#{machine.replace('.', '')}), {shape}, {precision} | " + " | ".join(line) + " |"
    yield f"\n{wins} wins, {losses} losses (bold); {single} of them are of one round, and vLLM took part in {with_vllm}."
    yield f"Measured from {min(days)} to {max(days)}. The cells name the commit of Headrace, and no version of another engine."


def is_win(ratio: float) -> bool:
    """ratio: a median over the best peer, judged as it is printed: 1.00 is not a loss."""
    return round(ratio, 2) >= 1.0


def _grid_cell(ratio: float, engines: Mapping[str, Rounds]) -> str:
    star = "*" if any(outcome.remark for rounds in engines.values() for outcome in rounds.values()) else ""
    return f"{ratio:.2f}{star}" if is_win(ratio) else f"**{ratio:.2f}**{star}"


def section(shape: str, precision: str, table: Table) -> Iterator[str]:
    yield f"### {shape}, {precision}\n"
    yield from offline_section(precision, table, GOALS[precision] if shape == SHAPES[0] else {})
    yield from http_section(shape, precision, table)
    yield from _circumstances(table)


def offline_section(precision: str, table: Table, goals: Mapping[str, float]) -> Iterator[str]:
    """The engines without a server: a line per row, nothing when none was measured. goals: see GOALS."""
    engines = [engine for engine in ENGINES if any(engine in table.get(row, {}) for row in ROWS)]
    if not engines:
        return
    yield "| | " + " | ".join(engines) + " | / best peer | / ceiling | MBU |"
    yield "|---" * (len(engines) + 4) + "|"
    for row in ROWS:
        if row not in table:
            continue
        columns = table[row]
        cells = [_cell(columns.get(engine, {})) for engine in engines]
        share = mbu(row, precision, columns.get("headrace", {}))
        cells.append(_ratio(advantages(row, columns, PEERS), goals.get("peer")))
        cells.append(_ratio(shares_of_ceiling(row, columns), goals.get("ceiling")))
        cells.append(_held(share, goals.get("mbu") if row == "decode-1" else None) if share else "-")
        yield f"| {row} | " + " | ".join(cells) + " |"
    yield ""
    if missing := [engine for engine in PEERS if engine not in engines]:
        yield f"Not measured: {', '.join(missing)}.\n"


def http_section(shape: str, precision: str, table: Table) -> Iterator[str]:
    """The servers under load, if any was: a line per rate and engine, medians over the rounds."""
    rows = [row for row in http.RATES if row in table]
    if not rows:
        return
    yield f"#### {shape}, {precision}: servers under load\n"
    lengths = http.WORKLOAD
    limits = [f"{name.upper()} <= {limit} ms" for name, _, limit in (word.partition(":") for word in http.SLOS[shape])]
    yield f"{http.NUM_REQUESTS} requests, Poisson, about {lengths.input_tokens} tokens in and {lengths.output_tokens} out; goodput:"
    yield f"requests per second within {' and '.join(limits)}. Failed requests are infinitely late.\n"
    yield "| offered/s | engine | TTFT p50, ms | p99 | ITL p50, ms | p99 | goodput/s | output tok/s | failed | rounds |"
    yield "|---" * 10 + "|"
    for row in rows:
        yield from (_http_line(engine, table[row][engine]) for engine in http.ENGINES if engine in table[row])
    yield ""
    if missing := [engine for engine in http.ENGINES if not any(engine in table[row] for row in rows)]:
        yield f"Not run: {', '.join(missing)}."
    lag = max(
        (o.load.get("client_lag_p99_s") or 0.0 for row in rows for rounds in table[row].values() for o in rounds.values()), default=0.0
    )
    yield f"The client's own lag, p99, was at most {lag * 1000:.1f} ms; it counts as latency.\n"


def _http_line(engine: str, rounds: Rounds) -> str:
    finished = [outcome.load for outcome in rounds.values() if outcome.value is not None]
    if not finished:
        return f"| - | {engine} |" + " - |" * 6 + f" all | {len(rounds)} |"
    nothing = dict.fromkeys(finished[0]) | {"rate": finished[0]["rate"], "goodput": 0.0, "output_tokens_per_s": 0.0}
    nothing |= dict.fromkeys(("failed", "offered"), float(http.NUM_REQUESTS))
    loads = [*finished, *[nothing] * (len(rounds) - len(finished))]

    def median(name: str, scale: float = 1.0) -> str:
        value = statistics.median(math.inf if load[name] is None else float(load[name] or 0.0) for load in loads)
        return _number(value * scale)

    times = [median(f"{name}_{quantile}_s", 1000.0) for name in ("ttft", "itl") for quantile in ("p50", "p99")]
    failed, offered = (sum(int(load[name] or 0) for load in loads) for name in ("failed", "offered"))
    figures = [median("rate"), engine, *times, median("goodput"), median("output_tokens_per_s"), f"{failed} of {offered}", str(len(loads))]
    return f"| {' | '.join(figures)} |"


def _circumstances(table: Table) -> Iterator[str]:
    outcomes = [outcome for columns in table.values() for rounds in columns.values() for outcome in rounds.values()]
    environments = [outcome.environment for outcome in outcomes]
    times = sorted(str(environment["time"]) for environment in environments)
    bandwidths = [outcome.read_bandwidth_bytes_per_s for outcome in outcomes if outcome.read_bandwidth_bytes_per_s]
    line = f"{environments[0]['cpu']}, {environments[0]['num_cpus']} CPUs, {times[0]} to {times[-1]}"
    if bandwidths:
        line += f", read bandwidth {min(bandwidths) / 1e9:.1f} to {max(bandwidths) / 1e9:.1f} GB/s"
    methods = [
        outcome.method for columns in table.values() for engine in columns if engine != "ceiling" for outcome in columns[engine].values()
    ]
    if methods and (method := min(methods)) < METHOD:
        line += f"; measured by method {method}, see [README](README.md#methods)"
    if any(outcome.method < CEILING_METHOD for columns in table.values() for outcome in columns.get("ceiling", {}).values()):
        line += "; the ceiling was asked in a turn of its own, minutes from Headrace's"
    yield line + ".\n"
    for row, columns in table.items():
        for engine, rounds in columns.items():
            yield from (f"- {row}, {engine}: {error}" for error in sorted({o.error for o in rounds.values() if o.error}))
            yield from (f"- {row}, {engine}, round {number}: {o.remark}." for number, o in sorted(rounds.items()) if o.remark)


def _cell(rounds: Rounds) -> str:
    outcomes = [outcome for outcome in rounds.values() if outcome.value is not None]
    values = [_scaled(outcome) for outcome in outcomes]
    if not values:
        return "failed" if rounds else "-"
    unit = {"bytes": " GB", "s": " s"}.get(outcomes[0].unit, "")
    if len(values) == 1:
        return f"{_number(values[0])}{unit}"
    return f"{_number(statistics.median(values))}{unit} [{_number(min(values))}, {_number(max(values))}]"


def _scaled(outcome: Outcome) -> float:
    assert outcome.value is not None
    return outcome.value / 1e9 if outcome.unit == "bytes" else outcome.value


def _ratio(ratios: list[float], goal: float | None) -> str:
    if not ratios:
        return "-"
    spread = f" [{min(ratios):.2f}, {max(ratios):.2f}] ({len(ratios)})" if len(ratios) > 1 else ""
    return _held(statistics.median(ratios), goal) + spread


def _held(value: float, goal: float | None) -> str:
    """A figure, and the goal where it falls short of it."""
    return f"{value:.2f}" if goal is None or round(value, 2) >= goal else f"**{value:.2f}** of {goal:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(found: Mapping[tuple[str, str], Table], target: Path, shape: str = SHAPES[0]) -> None:
    """Every engine's figure over the best peer's, row by row, one panel per precision; above the line is better."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "headrace"  # equal cells, equal file
    from matplotlib import pyplot

    panels = [precision for precision in PRECISIONS if (shape, precision) in found]
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, 3.2 * len(panels)), squeeze=False, layout="constrained")
    for axis, precision in zip(axes[:, 0], panels, strict=True):
        table = found[shape, precision]
        rows = [row for row in ROWS if row in table]
        shown = [engine for engine in ("headrace", *PEERS) if any(engine in table[row] for row in rows)]
        for place, engine in enumerate(shown):
            color = f"C{('headrace', *PEERS).index(engine)}"
            heights = [_against_best_peer(row, table[row], engine) for row in rows]
            axis.bar([x + 0.2 * (place - (len(shown) - 1) / 2) for x in range(len(rows))], heights, width=0.19, label=engine, color=color)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(rows)), rows, rotation=25, ha="right")
        axis.set_title(f"{shape}, {precision}: figure over the best peer's (higher is better)", fontsize=10)
        axis.margins(x=0.01)
        axis.legend(ncols=4, fontsize=8)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)


def _against_best_peer(row: str, engines: Mapping[str, Rounds], engine: str) -> float:
    """Median over the rounds; NaN where there is no figure."""
    ratios = advantages(row, engines, PEERS, own=engine)
    return statistics.median(ratios) if ratios else math.nan


def page(found: Mapping[str, Mapping[tuple[str, str], Table]]) -> str:
    """The grid, and the plot of each machine that has one."""
    plots = [f"![Engines beside the best peer on {machine}]({plot_of(machine).name})" for machine in found if plot_of(machine).is_file()]
    return "\n".join([HEADER % "\n".join(grid(found)), *plots]) + "\n"


def details(found: Mapping[str, Mapping[tuple[str, str], Table]]) -> str:
    """Every figure: a part per machine, a section per shape and precision."""
    parts = [TABLES_HEADER]
    for machine, tables_of_machine in found.items():
        parts.append(f"## {machine}\n")
        parts += ["\n".join(section(shape, precision, table)) for (shape, precision), table in tables_of_machine.items()]
    return "\n".join(parts).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-plot", action="store_true")
    given = parser.parse_args(arguments)
    found = tables()
    if not given.no_plot:
        for machine, tables_of_machine in found.items():
            draw(tables_of_machine, plot_of(machine))
    PAGE.write_text(page(found), encoding="utf-8")
    TABLES.write_text(details(found), encoding="utf-8")
    print(PAGE, TABLES)


if __name__ == "__main__":
    main()
