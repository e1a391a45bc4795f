"""Measures the cells of the comparison that have not been measured yet. Interrupt it at will: the next call goes on.

    python -m bench.peers.run --models FOLDER --envs FOLDER --shape llama-1.1b --precision bf16 --rounds 5

Engines take turns within a round, in reverse order every other round. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.machine import this_machine
from bench.peers.cells import ENGINES, PRECISIONS, SHAPES, Cell, Outcome, method_of, save
from bench.peers.engines import ROOT, CannotRun, Launch, Worker, launch_of, running
from bench.peers.llama_cpp import LlamaCpp, llama_cpp
from bench.peers.rows import Figure, Ids, measure, measure_in_turns, row_names
from bench.peers.shapes import products_of
from headrace.lab.environment import bandwidth_script, environment, measure_bandwidth

MEMORY_AFTER = "mixed-32"
"""The row after which an engine's peak memory is read, at the earliest."""


def rows_of(engine: str) -> tuple[str, ...]:
    return row_names() if engine == "ceiling" else ("startup", *row_names(), "memory")


@dataclass(kw_only=True)
class Turn:
    """One engine's part of a round: the cells that are still missing, and how each is measured."""

    shape: str
    precision: str
    engine: str
    round: int
    seed: int
    wanted: list[str]
    facts: Mapping[str, float]
    folders: Mapping[str, str]
    script: Path | None = field(default_factory=bandwidth_script)

    def cell(self, row: str) -> Cell:
        return Cell(this_machine(), self.shape, self.precision, self.engine, row, self.round)

    def without_folders(self, facts: Mapping[str, object]) -> dict[str, object]:
        """`facts` with the names of this machine's folders as the flags that gave them."""
        named: dict[str, object] = json.loads(self._named(json.dumps(facts)))
        return named

    def _named(self, text: str) -> str:
        for folder, name in self.folders.items():
            text = text.replace(folder, name)
        return text

    def keep(self, row: str, setting: Mapping[str, object], work: Callable[[], Figure]) -> None:
        """Measure one cell and write it down, whatever came of it."""
        bandwidth = measure_bandwidth(self.script)
        found, error = None, ""
        try:
            found = work()
        except CannotRun as failed:
            error = str(failed)
        outcome = Outcome(
            value=found.value if found else None,
            unit=found.unit if found else "",
            samples=found.samples if found else (),
            error=self._named(error),
            setting=self.without_folders(setting),
            environment=self.without_folders(asdict(environment())),
            read_bandwidth_bytes_per_s=bandwidth.bytes_per_s if bandwidth else None,
            read_bandwidth_pattern=bandwidth.pattern if bandwidth else None,
            facts=self.facts,
            load=found.load if found else {},
            method=method_of(self.engine),
        )
        save(self.cell(row), outcome)
        shown = f"{found.value:,.4g} {found.unit}" if found else error
        print(f"{self.shape} {self.precision} {self.engine} {row} #{self.round}: {shown}", flush=True)


def take_worker_turn(turn: Turn, worker: Worker) -> None:
    startup = worker.first_token_seconds()

    def memory() -> Figure:
        if MEMORY_AFTER not in turn.wanted:
            measure(MEMORY_AFTER, worker.ask, seed=turn.seed)
        return Figure(float(worker.peak_memory_bytes()), "bytes", ())

    for row in turn.wanted:
        if row == "startup":
            turn.keep(row, worker.setting, lambda: Figure(startup, "s", (startup,)))
        elif row == "memory":
            turn.keep(row, worker.setting, memory)
        else:
            turn.keep(row, worker.setting, lambda row=row: measure(row, worker.ask, seed=turn.seed))  # type: ignore[misc]


def take_llama_cpp_turn(turn: Turn, peer: LlamaCpp) -> None:
    peaks: list[int] = []

    def mixed() -> Figure:
        figure, peak = peer.mixed(turn.seed)
        peaks.append(peak)
        return figure

    def memory() -> Figure:
        if not peaks:
            mixed()
        return Figure(float(peaks[-1]), "bytes", ())

    special: dict[str, Callable[[], Figure]] = {"startup": peer.startup, MEMORY_AFTER: mixed, "memory": memory}
    for row in turn.wanted:
        turn.keep(row, peer.setting, special.get(row) or partial(peer.figure, row))


def take_ceiling_turn(turn: Turn, ceiling: Worker, headrace: Worker) -> None:
    """Headrace answers every question in turns with the ceiling: between an engine's turn and another's the clock may change by a tenth."""

    def ask(prompts: list[Ids], max_tokens: list[int]) -> float:
        try:
            return headrace.ask(prompts, max_tokens)
        except CannotRun as reason:  # the ceiling's figure stands without it
            print(f"{turn.shape} {turn.precision} headrace failed beside the ceiling: {reason}", flush=True)
            return math.inf

    def figure(row: str) -> Figure:
        own, limit = measure_in_turns(row, ask, ceiling.ask, seed=turn.seed)
        return replace(limit, load={"headrace": own.value if own.value > 0 else None})  # nan, of inf - inf, is not more than 0 either

    for row in turn.wanted:
        turn.keep(row, ceiling.setting, partial(figure, row))


def take(turn: Turn, model: Path, envs: Path, threads: int) -> None:
    if turn.engine == "llama.cpp":
        take_llama_cpp_turn(turn, llama_cpp(model, turn.precision, envs, threads))
        return

    def started(engine: str) -> AbstractContextManager[Worker]:
        return _logged(launch_of(engine, model, turn.precision, envs, threads))

    with started(turn.engine) as worker:
        if turn.engine != "ceiling":
            take_worker_turn(turn, worker)
            return
        with started("headrace") as headrace:
            for one in (worker, headrace):
                one.first_token_seconds()  # neither loads while the other is measured
            take_ceiling_turn(turn, worker, headrace)


@contextmanager
def _logged(launch: Launch) -> Iterator[Worker]:
    """A worker whose log is shown if it cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "worker.log"
        try:
            with running(launch, log) as worker:
                yield worker
        except CannotRun:
            sys.stderr.write(log.read_text(errors="replace")[-3000:])
            raise


def parser_of(description: str | None, engines: tuple[str, ...], rows: tuple[str, ...]) -> argparse.ArgumentParser:
    """The flags of every command that measures cells."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_folder, required=True, help="folder of the checkpoints and their conversions")
    parser.add_argument("--envs", type=_folder, required=True, help="folder of the peers' environments")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="again for more; default: all")
    parser.add_argument("--engine", choices=engines, action="append", help="again for more; default: all")
    parser.add_argument("--row", choices=rows, action="append", help="again for more; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.set_defaults(every_engine=engines)
    return parser


def _folder(word: str) -> Path:
    return Path(word).expanduser()


Take = Callable[[Turn, Path, Path, int], None]
"""(turn, model, environments, threads): measure the turn's cells. May raise CannotRun: the engine is left out."""


def take_turns(given: argparse.Namespace, rows_of: Callable[[str], tuple[str, ...]], take: Take) -> None:
    """All rounds of what `given` names: engines take turns within a round, in reverse order every other round."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process that is measured is ended, too
    engines = tuple(given.engine or given.every_engine)
    model = given.models / given.shape
    products = products_of(model)
    for precision in given.precision or PRECISIONS:
        for number in range(given.rounds):
            for engine in engines if number % 2 == 0 else engines[::-1]:
                turn = Turn(
                    shape=given.shape,
                    precision=precision,
                    engine=engine,
                    round=number,
                    seed=number,
                    wanted=[row for row in rows_of(engine) if not given.row or row in given.row],
                    facts={"weights": products.weights, "kv_numbers_per_token": products.kv_numbers},
                    folders={str(given.models): "MODELS", str(given.envs): "ENVS", str(ROOT): "CHECKOUT"},  # a longer one first
                )
                turn.wanted = [row for row in turn.wanted if not turn.cell(row).is_done]
                if not turn.wanted:
                    continue
                try:
                    take(turn, model, given.envs, given.threads)
                except CannotRun as reason:
                    print(f"{given.shape} {precision} {engine} left out: {reason}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    given = parser_of(__doc__, ENGINES, ("startup", *row_names(), "memory")).parse_args(arguments)
    take_turns(given, rows_of, take)


if __name__ == "__main__":
    main()
