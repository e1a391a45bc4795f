"""`make bench-smoke`: the working tree against another commit, row by row in turns; exit status 1 when a row became slower.

    make bench-smoke ARGS="--against COMMIT"

Default commit: on a branch, where it left main; on main, HEAD where src differs from it, else the commit before. A round times every row
base, candidate, candidate, base (the next round the other way round) with the same prompts; rounds go on until `--seconds` are spent.
Two workers wait for each other, so only one side computes; they are renewed every few rounds, servers in every round. An alarm is a row
at least 2 % slower with p < 0.01 after Holm's correction (`verdict`). Writes bench/results/MACHINE/smoke.json. Exit status 2: no verdict.

The time is counted from the second, warm round on: kernels that were never compiled here are compiled in the first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench.harness import ROOT, write_portable
from bench.machine import results_file
from bench.smoke.children import Server, Worker, server, worker
from bench.smoke.model import make_model
from bench.smoke.trees import Side, SmokeError, default_base, git, two_trees
from bench.smoke.verdict import LEVEL, SLOWER, RowVerdict, judge
from headrace.lab.environment import bandwidth_script, environment, measure_bandwidth
from headrace.tensor.kernels.compile_cache import cache_root

WORKER_ROWS = (
    *(f"{kind} {precision}" for precision in ("bf16", "int8", "int4") for kind in ("decode-1", "decode-8", "prefill")),
    "scheduler",
)
START, STREAMING = "start to first token", "streaming over HTTP"
ROWS = (*WORKER_ROWS, STREAMING, START)
ROUNDS_PER_WORKER = 4
Pair = tuple[float, float]
"""Seconds of base and candidate."""
Timer = Callable[[int], float]
"""Seed -> seconds."""


def in_turns(base: Timer, candidate: Timer, number: int) -> Pair:
    """Each side twice, base outside in even rounds and inside in odd ones; geometric means of the two."""
    outer, inner = (base, candidate) if number % 2 == 0 else (candidate, base)
    first, second = 2 * number, 2 * number + 1
    times = outer(first), inner(first), inner(second), outer(second)
    outside, inside = math.sqrt(times[0] * times[3]), math.sqrt(times[1] * times[2])
    return (outside, inside) if number % 2 == 0 else (inside, outside)


def log_ratios(rounds: Sequence[Mapping[str, Pair]]) -> dict[str, list[float]]:
    """Row -> log(candidate / base), round by round."""
    return {row: [math.log(pairs[row][1] / pairs[row][0]) for pairs in rounds] for row in rounds[0]}


class Comparison:
    """Both sides' processes, and the rounds so far."""

    def __init__(self, base: Side, candidate: Side, model: Path, logs: Path, rows: Sequence[str]) -> None:
        self._sides, self._model, self._logs, self._rows = (base, candidate), model, logs, rows
        self.rounds: list[dict[str, Pair]] = []

    def block(self, first: int, keep_going: Callable[[int], bool]) -> int:
        """Rounds on one pair of workers, from number `first` on. Returns the number after the last."""
        with ExitStack() as stack:
            workers = [stack.enter_context(worker(side, self._model, self._logs / f"{side.name}.log")) for side in self._sides]
            for side, started in zip(self._sides, workers, strict=True):
                _check_origin(side, started)
            if first == 0:
                self.round(0, workers)  # warms up; not kept
                self.rounds.clear()
            number = first
            while number < first + ROUNDS_PER_WORKER and keep_going(number):
                self.round(number, workers)
                number += 1
        return number

    def round(self, number: int, workers: Sequence[Worker]) -> None:
        base, candidate = workers
        seconds = {row: (partial(base.seconds, row), partial(candidate.seconds, row)) for row in WORKER_ROWS if row in self._rows}
        pairs = {row: in_turns(*timers, number) for row, timers in seconds.items()}
        served = self._serve(number) if {STREAMING, START} & set(self._rows) else {}
        self.rounds.append({**pairs, **{row: pair for row, pair in served.items() if row in self._rows}})

    def _serve(self, number: int) -> dict[str, Pair]:
        with ExitStack() as stack:
            servers: dict[str, Server] = {}
            for side in self._sides if number % 2 == 0 else reversed(self._sides):
                servers[side.name] = stack.enter_context(server(side, self._logs / f"{side.name}-server.log"))
            base, candidate = servers["base"], servers["candidate"]
            streaming = in_turns(base.stream_seconds, candidate.stream_seconds, number)
            base.leave()
            candidate.leave()  # both at once
        return {STREAMING: streaming, START: (base.start_s, candidate.start_s)}


def _check_origin(side: Side, started: Worker) -> None:
    """A comparison of a tree with itself would never alarm."""
    origin = Path(started.hear()["ready"]["headrace"])
    if not origin.is_relative_to(side.source):
        raise SmokeError(f"{side.name} runs {origin}, not {side.source}")


def compare(base: Side, candidate: Side, home: Path, seconds: float, rows: Sequence[str]) -> list[dict[str, Pair]]:
    """Rounds for about `seconds`: the next one begins while it would end in time, judging by the longest so far."""
    with tempfile.TemporaryDirectory() as logs:
        comparison = Comparison(base, candidate, make_model(home / "model"), Path(logs), rows)
        moments: list[float] = []

        def keep_going(number: int) -> bool:
            moments.append(time.monotonic())
            spent, longest = moments[-1] - moments[0], max((b - a for a, b in itertools.pairwise(moments)), default=0.0)
            print(f"{spent:.0f} s: {number} rounds", file=sys.stderr, flush=True)
            return spent + longest <= seconds

        number = 0
        while (after := comparison.block(number, keep_going)) == number + ROUNDS_PER_WORKER:
            number = after
        return comparison.rounds


def table(verdicts: Sequence[RowVerdict], rounds: Sequence[Mapping[str, Pair]]) -> str:
    lines = [f"{'row':24} {'base':>10} {'candidate':>10}  {'ratio':>6} {'95 % interval':>16}  {'p, Holm':>8}"]
    for found in verdicts:
        base, candidate = (sorted(pairs[found.row][side] for pairs in rounds)[len(rounds) // 2] * 1000 for side in (0, 1))
        interval = f"[{found.low:.3f}, {found.high:.3f}]"
        mark = "  SLOWER" if found.is_alarm else ""
        lines.append(f"{found.row:24} {base:7.1f} ms {candidate:7.1f} ms  {found.ratio:6.3f} {interval:>16}  {found.adjusted:8.2g}{mark}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-smoke", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="commit to compare with; default: see above")
    parser.add_argument("--seconds", type=float, default=240.0, help="for the rounds that count (default: 240)")
    parser.add_argument("--row", choices=ROWS, action="append", help="again for more; default: all")
    parser.add_argument("--json", type=Path, default=results_file("smoke"))
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that trees and children go, too
    home = cache_root(os.environ) / "smoke"
    try:
        commit = git(ROOT, "rev-parse", "--short=12", "--verify", f"{given.against or default_base(ROOT)}^{{commit}}")
        before, began = measure_bandwidth(bandwidth_script()), time.monotonic()
        with two_trees(ROOT, commit, home) as (base, candidate):
            rounds = compare(base, candidate, home, given.seconds, given.row or ROWS)
        took_s = time.monotonic() - began
        verdicts = judge(log_ratios(rounds)) if rounds else []
        if not verdicts:
            raise SmokeError(f"not one round ended within {given.seconds:g} s")
    except (SmokeError, ValueError) as error:
        print(f"no verdict: {error}", file=sys.stderr)
        return 2
    print(table(verdicts, rounds))
    alarms = [found.row for found in verdicts if found.is_alarm]
    print(f"{'slower than' if alarms else 'no slower than'} {commit}{': ' if alarms else ''}{', '.join(alarms)} ({took_s:.0f} s)")
    bandwidths = {"before": before, "after": measure_bandwidth(bandwidth_script())}
    facts = {"base": commit, "environment": environment(), "read_bandwidth_bytes_per_s": bandwidths, "seconds": took_s}
    rule = {"slower": SLOWER, "level": LEVEL, "alarms": alarms}
    write_portable(given.json, {**facts, **rule, "verdicts": [asdict(found) for found in verdicts], "rounds": rounds})
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
