"""Times the working tree against another commit, row by row in turns: `make bench-smoke`.

    make bench-smoke ARGS="--against COMMIT"

Exit status 1: a row became slower; 2: no verdict. Default commit: on a branch, where it left main; on main, HEAD where src differs from it,
else the commit before.

A round times every row base, candidate, candidate, base (the next round the other way round) with the same prompts. A server's start takes
longer than a hundred decode steps, so its rows have their few rounds first. The remaining rows that look slower after SCREEN_ROUNDS rounds
are timed alone until `--seconds` are spent: shared by all, the time would be too short to tell a tenth from noise. Two workers wait for
each other, so only one side computes. They are renewed now and then, servers in every round. An alarm is a row at least 2 % slower with p <
0.01 after Holm's correction (`verdict`). Writes bench/results/MACHINE/smoke.json.

The time is counted from the second, warm round on: kernels that were never compiled here are compiled in the first.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.harness import ROOT, write_portable
from bench.machine import results_file
from bench.smoke.children import Server, Worker, server, worker
from bench.smoke.model import make_model
from bench.smoke.trees import Side, SmokeError, default_base, git, two_trees
from bench.smoke.verdict import LEVEL, SLOWER, RowVerdict, cleared, judge, rounds_needed, suspects
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.machine.cache_folder import cache_root

WORKER_ROWS = (
    *(f"{kind} {precision}" for precision in ("bf16", "int8", "int4") for kind in ("decode-1", "decode-8", "prefill")),
    "scheduler",
)
START, STREAMING = "start to first token", "streaming over HTTP"
SERVED_ROWS = (STREAMING, START)
ROWS = (*WORKER_ROWS, *SERVED_ROWS)
SERVED_ROUNDS = rounds_needed(len(ROWS))
"""Enough for an alarm even if every other row is looked at again."""
SCREEN_ROUNDS = 6
ROUNDS_PER_WORKER, WORKER_S = 3, 25.0
"""A pair of workers is renewed after this many rounds and seconds: where its memory happens to lie is luck, too."""
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


def pairs_of(rounds: Sequence[Mapping[str, Pair]], rows: Sequence[str]) -> dict[str, list[Pair]]:
    return {row: [pairs[row] for pairs in rounds] for row in rows}


def log_ratios(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, list[float]]:
    """Row -> log(candidate / base), round by round."""
    return {row: [math.log(candidate / base) for base, candidate in both] for row, both in pairs.items()}


class Comparison:
    """Both sides' processes and the time they have."""

    def __init__(self, base: Side, candidate: Side, model: Path, logs: Path) -> None:
        self._sides, self._model, self._logs = (base, candidate), model, logs
        self._number = 0
        self._ends = math.inf

    def begin(self, rows: Sequence[str], seconds: float) -> None:
        """A round of all rows, which is not kept: it compiles and warms what there is. The time counts from here on."""
        self.rounds(rows, 1)
        self._ends = time.monotonic() + seconds

    def rounds(self, rows: Sequence[str], most: float = math.inf) -> list[dict[str, Pair]]:
        """At most `most` rounds of these rows; the next one begins while it would end in time, judging by the longest so far."""
        done: list[dict[str, Pair]] = []
        longest = 0.0

        def go_on() -> bool:
            return len(done) < most and time.monotonic() + longest <= self._ends

        while rows and go_on():
            with ExitStack() as stack:
                workers = [stack.enter_context(made) for made in self._workers()] if set(rows) & set(WORKER_ROWS) else []
                for side, started in zip(self._sides, workers, strict=False):
                    _check_origin(side, started)
                came, first = time.monotonic(), len(done)
                while go_on() and (len(done) < first + ROUNDS_PER_WORKER or time.monotonic() < came + WORKER_S):
                    began = time.monotonic()
                    done.append(self._round(rows, workers))
                    longest = max(longest, time.monotonic() - began)
        print(f"{len(done)} rounds of {len(rows)} rows", file=sys.stderr, flush=True)
        return done

    def _workers(self) -> list[AbstractContextManager[Worker]]:
        return [worker(side, self._model, self._logs / f"{side.name}.log") for side in self._sides]

    def _round(self, rows: Sequence[str], workers: Sequence[Worker]) -> dict[str, Pair]:
        pairs: dict[str, Pair] = {}
        for row in WORKER_ROWS:
            if row in rows:
                base, candidate = (partial(started.seconds, row) for started in workers)
                pairs[row] = in_turns(base, candidate, self._number)
        served = self._serve() if set(SERVED_ROWS) & set(rows) else {}
        self._number += 1
        return {**pairs, **{row: pair for row, pair in served.items() if row in rows}}

    def _serve(self) -> dict[str, Pair]:
        with ExitStack() as stack:
            servers: dict[str, Server] = {}
            for side in self._sides if self._number % 2 == 0 else reversed(self._sides):
                servers[side.name] = stack.enter_context(server(side, self._logs / f"{side.name}-server.log"))
            base, candidate = servers["base"], servers["candidate"]
            streaming = in_turns(base.stream_seconds, candidate.stream_seconds, self._number)
            base.leave()
            candidate.leave()  # both at once
        return {STREAMING: streaming, START: (base.start_s, candidate.start_s)}


def _check_origin(side: Side, started: Worker) -> None:
    """A comparison of a tree with itself would never alarm."""
    origin = Path(started.hear()["ready"]["headrace"])
    if not origin.is_relative_to(side.source):
        raise SmokeError(f"{side.name} runs {origin}, not {side.source}")


@dataclass(frozen=True, slots=True)
class Compared:
    """served: rounds of the servers' rows; first: of every other row; second: of the rows that looked slower."""

    served: dict[str, list[Pair]]
    first: dict[str, list[Pair]]
    second: dict[str, list[Pair]]

    @property
    def pairs(self) -> dict[str, list[Pair]]:
        """Those that decided about a row."""
        return self.first | self.second | self.served

    def verdicts(self) -> list[RowVerdict]:
        """Row by row. Raises ValueError where there was too little time to judge."""
        judged = {found.row: found for found in judge(log_ratios(self.second | self.served))}
        return [judged.get(row) or cleared(row, logs) for row, logs in log_ratios(self.pairs).items()]


def compare(base: Side, candidate: Side, home: Path, seconds: float, rows: Sequence[str]) -> Compared:
    timed, served = ([row for row in kind if row in rows] for kind in (WORKER_ROWS, SERVED_ROWS))
    with tempfile.TemporaryDirectory() as logs:
        comparison = Comparison(base, candidate, make_model(home / "model"), Path(logs))
        comparison.begin(rows, seconds)
        answers = pairs_of(comparison.rounds(served, SERVED_ROUNDS), served)
        first = comparison.rounds(timed, SCREEN_ROUNDS)
        if timed and len(first) < SCREEN_ROUNDS:
            raise SmokeError(f"{len(first)} rounds of {SCREEN_ROUNDS} ended within {seconds:g} s")
        screened = pairs_of(first, timed)
        suspected = suspects(log_ratios(screened))
        print(f"looking again at {', '.join(suspected) or 'nothing'}", file=sys.stderr, flush=True)
        return Compared(answers, screened, pairs_of(comparison.rounds(suspected), suspected))


def table(verdicts: Sequence[RowVerdict], pairs: Mapping[str, Sequence[Pair]]) -> str:
    lines = [f"{'row':24} {'base':>10} {'candidate':>10}  {'ratio':>6} {'95 % interval':>16}  {'rounds':>6}  {'p, Holm':>8}"]
    for found in verdicts:
        base, candidate = (1000 * statistics.median(pair[side] for pair in pairs[found.row]) for side in (0, 1))
        interval = f"[{found.low:.3f}, {found.high:.3f}]"
        mark = "  SLOWER" if found.is_alarm else ""
        ratio = f"{found.ratio:6.3f} {interval:>16}  {found.rounds:6}  {found.adjusted:8.2g}{mark}"
        lines.append(f"{found.row:24} {base:7.1f} ms {candidate:7.1f} ms  {ratio}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-smoke", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="commit to compare with; default: see above")
    parser.add_argument("--seconds", type=float, default=235.0, help="for the rounds that count (default: 235)")
    parser.add_argument("--row", choices=ROWS, action="append", help="again for more; default: all")
    parser.add_argument("--json", type=Path, default=results_file("smoke"))
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that trees and children go, too
    home = cache_root(os.environ) / "smoke"
    try:
        commit = git(ROOT, "rev-parse", "--short=12", "--verify", f"{given.against or default_base(ROOT)}^{{commit}}")
        before, began = measure_bandwidth(bandwidth_script()), time.monotonic()
        with two_trees(ROOT, commit, home) as (base, candidate):
            compared = compare(base, candidate, home, given.seconds, given.row or ROWS)
        took_s, verdicts = time.monotonic() - began, compared.verdicts()
    except (SmokeError, ValueError) as error:
        print(f"no verdict: {error}", file=sys.stderr)
        return 2
    print(table(verdicts, compared.pairs))
    alarms = [found.row for found in verdicts if found.is_alarm]
    print(f"{f'slower than {commit}: ' + ', '.join(alarms) if alarms else f'nothing shown to be slower than {commit}'} ({took_s:.0f} s)")
    bandwidths = {"before": bandwidth_facts(before), "after": bandwidth_facts(measure_bandwidth(bandwidth_script()))}
    facts = {"base": commit, "environment": environment(), "read_bandwidth": bandwidths, "seconds": took_s}
    rule = {"slower": SLOWER, "level": LEVEL, "alarms": alarms}
    write_portable(given.json, {**facts, **rule, "verdicts": [asdict(found) for found in verdicts], **asdict(compared)})
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
