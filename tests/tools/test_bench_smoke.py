"""Tests the guard against slow-downs: what it calls an alarm, how it compares two processes, and that it leaves nothing behind.

Nothing is timed: stubs say how long they took.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.smoke import run
from bench.smoke.children import Worker, running
from bench.smoke.run import SCREEN_ROUNDS, SERVED_ROUNDS, START, STREAMING, Compared, Pair, in_turns, log_ratios, pairs_of, table
from bench.smoke.trees import Side, SmokeError, default_base, git, two_trees
from bench.smoke.verdict import LEVEL, SUSPECT_P, hodges_lehmann, holm, judge, rounds_needed, signed_rank_p, suspects
from tests.lab.test_fake_clock import VirtualClock

pytestmark = pytest.mark.pure

ROWS = 12
STUB = """
import json, os, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    seconds = 0.002 * (1 + 0.001 * (asked["seed"] % 7))
    if asked["row"] == "slow":
        seconds += float(os.environ["STUB_SLEEP_S"])
    if asked["row"] == "dies":
        sys.exit("the stub gives up")
    print(json.dumps({"seconds": seconds, "seed": asked["seed"]}), flush=True)
"""


def noise(seed: int, *, rounds: int = 13, spread: float = 0.01, shift: float = 0.0) -> list[float]:
    draw = random.Random(seed)
    return [shift + draw.gauss(0.0, spread) for _ in range(rounds)]


def rows_with(**changed: list[float]) -> Mapping[str, list[float]]:
    return {**{f"row {number}": noise(number) for number in range(ROWS - len(changed))}, **changed}


def alarms(samples: Mapping[str, list[float]]) -> list[str]:
    return [found.row for found in judge(samples) if found.is_alarm]


# --- the verdict ---


def test_noise_alone_does_not_alarm() -> None:
    assert not any(alarms({f"{number}": noise(100 * trial + number) for number in range(ROWS)}) for trial in range(50))


def test_a_row_that_became_five_per_cent_slower_alarms_and_no_other_does() -> None:
    found = {verdict.row: verdict for verdict in judge(rows_with(slow=noise(99, shift=math.log(1.05))))}
    assert [row for row, verdict in found.items() if verdict.is_alarm] == ["slow"]
    assert found["slow"].low < 1.05 < found["slow"].high


def test_one_per_cent_is_no_alarm_however_sure() -> None:
    """Certain, but less than what is worth a red light."""
    samples = rows_with(slow=[math.log(1.01)] * 13)
    assert alarms(samples) == []
    assert next(found for found in judge(samples) if found.row == "slow").adjusted < 0.01


def test_a_row_that_became_faster_does_not_alarm() -> None:
    assert alarms(rows_with(fast=noise(99, shift=math.log(0.9)))) == []


def test_one_disturbed_round_neither_alarms_nor_hides_an_alarm() -> None:
    assert alarms(rows_with(row=[*noise(99, rounds=12), math.log(5.0)])) == []
    assert alarms(rows_with(row=[*noise(98, rounds=13, spread=0.005, shift=math.log(1.05)), -0.0001])) == ["row"]


def test_too_few_rounds_to_alarm_are_refused_instead_of_passed() -> None:
    needed = rounds_needed(ROWS)
    assert ROWS * 0.5**needed < 0.01 <= ROWS * 0.5 ** (needed - 1)
    assert alarms({str(row): [0.1 + 0.001 * i for i in range(needed)] for row in range(ROWS)})
    with pytest.raises(ValueError, match="rounds"):
        judge({str(row): [0.1] * (needed - 1) for row in range(ROWS)})


@pytest.mark.parametrize("logs", [[0.3, -0.1, 0.2], [0.1, 0.1, -0.1, 0.4], [0.0, 0.2, -0.3, 0.5, 0.7], [-1.0, -2.0]])
def test_p_is_the_share_of_sign_flips_counted_one_by_one(logs: list[float]) -> None:
    ranks = [sum(abs(other) < abs(value) for other in logs) + sum(abs(other) <= abs(value) for other in logs) + 1 for value in logs]
    seen = sum(rank for rank, value in zip(ranks, logs, strict=True) if value > 0)
    flips = [sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign) for signs in itertools.product((0, 1), repeat=len(logs))]
    assert signed_rank_p(logs) == pytest.approx(sum(flip >= seen for flip in flips) / len(flips))


def test_false_alarms_of_one_row_stay_below_the_level() -> None:
    """3000 rows without a difference: p < 0.05 in at most the share it promises, four standard errors allowed."""
    hits = sum(signed_rank_p(noise(seed, rounds=11)) < 0.05 for seed in range(3000))
    assert hits / 3000 < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 3000)


def test_holm_multiplies_the_smallest_most_and_never_falls() -> None:
    assert holm([0.03, 0.01, 0.04]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    inside = 0
    for seed in range(400):
        _, low, high = hodges_lehmann(noise(seed, rounds=12, shift=0.02))
        inside += low <= 0.02 <= high
    assert inside / 400 >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 400)


# --- two looks ---


def pairs_at(logs: list[float]) -> list[Pair]:
    return [(1.0, math.exp(log)) for log in logs]


def test_the_first_look_chooses_and_only_the_second_decides() -> None:
    """Rows that looked slow by chance are looked at again and cleared; those that looked well keep the verdict of the first."""
    unlucky, slow, well = [0.2] * SCREEN_ROUNDS, [0.2] * SCREEN_ROUNDS, [-0.01, 0.01, -0.02, 0.005, -0.03, -0.02]
    assert suspects({"unlucky": unlucky, "slow": slow, "well": well}) == ["unlucky", "slow"]
    first = {"unlucky": pairs_at(unlucky), "slow": pairs_at(slow), "well": pairs_at(well)}
    second = {"unlucky": pairs_at(noise(1, rounds=30)), "slow": pairs_at(noise(2, rounds=30, shift=math.log(1.05)))}
    verdicts = Compared({}, first, second).verdicts()
    assert [(found.row, found.is_alarm, found.rounds) for found in verdicts] == [
        ("unlucky", False, 30), ("slow", True, 30), ("well", False, SCREEN_ROUNDS)
    ]  # fmt: skip


def test_no_suspect_is_a_verdict_too() -> None:
    assert [found.is_alarm for found in Compared({}, {"row": pairs_at([-0.1] * SCREEN_ROUNDS)}, {}).verdicts()] == [False]


def test_a_second_look_without_time_is_no_verdict() -> None:
    first = {"row": pairs_at([0.2] * SCREEN_ROUNDS)}
    with pytest.raises(ValueError, match="2 rounds, but 1 rows need 7"):
        Compared({}, first, {"row": pairs_at([0.2] * 2)}).verdicts()


def test_rows_without_a_difference_are_suspected_no_more_often_than_said() -> None:
    hits = sum(bool(suspects({"row": noise(seed, rounds=SCREEN_ROUNDS)})) for seed in range(2000))
    assert 0.2 < hits / 2000 < SUSPECT_P


def test_both_looks_together_alarm_by_chance_no_more_often_than_the_level_and_find_what_is_slow() -> None:
    """1000 comparisons from the first look to the verdict: equal rows, then one a tenth slower; four standard errors allowed."""
    draw, trials = random.Random(5), 1000

    def looks(rows: Iterable[str], rounds: int, slow: str = "") -> dict[str, list[Pair]]:
        return {row: pairs_at([draw.gauss(0.1 if row == slow else 0.0, 0.07) for _ in range(rounds)]) for row in rows}

    def alarm(slow: str = "") -> list[str]:
        first = looks(run.WORKER_ROWS, SCREEN_ROUNDS, slow)
        second = looks(suspects(log_ratios(first)), 20, slow)
        verdicts = Compared(looks(run.SERVED_ROWS, SERVED_ROUNDS), first, second).verdicts()
        return [found.row for found in verdicts if found.is_alarm]

    hits = sum(bool(alarm()) for _ in range(trials))
    assert 0 < hits / trials < LEVEL + 4 * math.sqrt(LEVEL * (1 - LEVEL) / trials)
    slow = run.WORKER_ROWS[4]
    assert sum(slow in alarm(slow) for _ in range(50)) >= 45


# --- turns ---


@pytest.mark.parametrize(("number", "order"), [(0, "base candidate candidate base"), (1, "candidate base base candidate")])
def test_sides_take_turns_with_the_same_seeds(number: int, order: str) -> None:
    calls: list[tuple[str, int]] = []

    def timer(name: str, seconds: float, seed: int) -> float:
        calls.append((name, seed))
        return seconds

    pair = in_turns(lambda seed: timer("base", 2.0, seed), lambda seed: timer("candidate", 3.0, seed), number)
    assert pair == pytest.approx((2.0, 3.0))
    assert [name for name, _ in calls] == order.split()
    assert [seed for _, seed in calls] == [2 * number, 2 * number, 2 * number + 1, 2 * number + 1]


# --- processes ---


def stub_rounds(tmp_path: Path, sleeps: tuple[float, float], rounds: int) -> list[dict[str, Pair]]:
    """Two stub processes, base and candidate, whose row "slow" takes longer by what their variable says."""
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    with ExitStack() as stack:
        stubs = []
        for name, sleep_s in zip(("base", "candidate"), sleeps, strict=True):
            environ = {**os.environ, "STUB_SLEEP_S": str(sleep_s)}
            process = stack.enter_context(running([sys.executable, str(script)], environ, tmp_path / name))
            stubs.append(Worker(name, process, tmp_path / name))
            stubs[-1].hear()
        base, candidate = stubs
        return [
            {row: in_turns(partial(base.seconds, row), partial(candidate.seconds, row), n) for row in ("slow", "same")}
            for n in range(rounds)
        ]


@pytest.mark.process
def test_a_process_that_is_slow_in_one_row_is_found_and_named(tmp_path: Path) -> None:
    rounds = stub_rounds(tmp_path, (0.0, 0.02), rounds_needed(2))
    pairs = pairs_of(rounds, ("slow", "same"))
    verdicts = judge(log_ratios(pairs))
    assert [found.row for found in verdicts if found.ratio > 2] == ["slow"]
    assert verdicts[0].is_alarm
    text = table(verdicts, pairs)
    assert any(line.startswith("slow ") and line.endswith("SLOWER") for line in text.splitlines())


class StubWorker:
    """Takes 22 ms of the clock for `slow` in the candidate, and about 2 ms for any other row."""

    def __init__(self, side: Side, slow: str, clock: VirtualClock) -> None:
        self._side, self._slow, self._clock = side, slow, clock

    def hear(self) -> dict[str, Any]:
        return {"ready": {"headrace": str(self._side.source / "headrace")}}

    def seconds(self, row: str, seed: int) -> float:
        took_s = 0.002 * (1.0 + 0.001 * (seed % 7))
        if self._side.name == "candidate" and row == self._slow:
            took_s += 0.02
        self._clock.wait(took_s)
        return took_s


def test_time_left_goes_to_the_rows_that_looked_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison from end to end, over stubs and on virtual time: one row of two is slow in the candidate."""
    slow, same = run.WORKER_ROWS[0], run.WORKER_ROWS[-1]
    started: list[str] = []
    clock = VirtualClock()

    @contextmanager
    def stub(side: Side, model: Path, log: Path) -> Iterator[StubWorker]:
        started.append(side.name)
        yield StubWorker(side, slow, clock)

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(run, "worker", stub)
    monkeypatch.setattr(run, "make_model", lambda folder: folder)
    monkeypatch.setattr(run, "WORKER_S", 0.0)
    base, candidate = (Side(name, tmp_path / name, tmp_path) for name in ("base", "candidate"))
    compared = run.compare(base, candidate, tmp_path, 3.0, (slow, same))
    assert [len(pairs) for pairs in compared.first.values()] == [SCREEN_ROUNDS] * 2
    assert len(compared.second[slow]) > 2 * SCREEN_ROUNDS
    renewals = math.ceil(len(compared.second[slow]) / run.ROUNDS_PER_WORKER)
    # The first pair warms up; the time may be over when the last one has come.
    assert len(started) // 2 - (1 + SCREEN_ROUNDS // run.ROUNDS_PER_WORKER + renewals) in (0, 1)
    assert [found.row for found in compared.verdicts() if found.ratio > 2] == [slow]


class StubServer:
    """Takes as long to start and to stream as it is told, and writes down who was asked for what."""

    def __init__(self, side: Side, slowness: float, journal: list[str]) -> None:
        self.start_s = slowness
        self._side, self._slowness, self._journal = side.name, slowness, journal

    def stream_seconds(self, seed: int) -> float:
        self._journal.append(f"{self._side} streams")
        return self._slowness * (1.0 + 0.001 * (seed % 7))

    def leave(self) -> None:
        self._journal.append(f"{self._side} leaves")


def test_servers_have_their_rounds_and_a_slower_one_is_found_in_both_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal: list[str] = []

    @contextmanager
    def stub(side: Side, log: Path) -> Iterator[StubServer]:
        journal.append(f"{side.name} starts")
        yield StubServer(side, 1.1 if side.name == "candidate" else 1.0, journal)

    monkeypatch.setattr(run, "server", stub)
    monkeypatch.setattr(run, "make_model", lambda folder: folder)
    base, candidate = (Side(name, tmp_path / name, tmp_path) for name in ("base", "candidate"))
    compared = run.compare(base, candidate, tmp_path, 60.0, (STREAMING, START))
    assert [len(pairs) for pairs in compared.served.values()] == [SERVED_ROUNDS] * 2
    assert [(found.row, found.is_alarm) for found in compared.verdicts()] == [(STREAMING, True), (START, True)]
    turns = (
        "starts base, starts candidate, base, candidate, candidate, base",
        "starts candidate, starts base, candidate, base, base, candidate",
    )
    rounds = [journal[first : first + 8] for first in range(0, len(journal), 8)]
    assert len(rounds) == 1 + SERVED_ROUNDS  # one to warm up
    for number, events in enumerate(rounds):
        began = [event.split()[0] for event in events if event.endswith("starts")]
        streamed = [event.split()[0] for event in events if event.endswith("streams")]
        assert ", ".join([*(f"starts {side}" for side in began), *streamed]) == turns[number % 2]
        assert events[-2:] == ["base leaves", "candidate leaves"]


@pytest.mark.process
def test_a_worker_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    with running([sys.executable, str(script)], os.environ, tmp_path / "log") as process:
        worker = Worker("candidate", process, tmp_path / "log")
        worker.hear()
        with pytest.raises(SmokeError, match="candidate ended with 1: the stub gives up"):
            worker.seconds("dies", 0)
    assert process.returncode == 1


@pytest.mark.process
def test_processes_are_gone_after_a_failure(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="interrupted"),
        running([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, tmp_path / "log") as process,
    ):
        raise RuntimeError("interrupted")
    assert process.returncode is not None


# --- trees ---


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of two commits on main, `src/file` being "one", then "two"."""
    root = tmp_path / "checkout"
    (root / "src").mkdir(parents=True)
    for command in (["init", "-q", "-b", "main"], ["config", "user.email", "a@b.example"], ["config", "user.name", "A"]):
        git(root, *command)
    for text in ("one", "two"):
        (root / "src" / "file").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", text)
    return root


@pytest.mark.process
def test_sides_are_the_commit_and_the_working_tree_and_both_go(checkout: Path, tmp_path: Path) -> None:
    (checkout / "src" / "file").write_text("three, not committed")
    home = tmp_path / "home"
    with suppress(KeyboardInterrupt), two_trees(checkout, "HEAD~1", home) as (base, candidate):
        assert (base.source / "file").read_text() == "one"
        assert (candidate.source / "file").read_text() == "three, not committed"
        assert base.environ()["PYTHONPATH"] == str(base.source)
        assert base.environ()["HEADRACE_CACHE_DIR"] != candidate.environ()["HEADRACE_CACHE_DIR"]
        raise KeyboardInterrupt
    assert not (home / "base").exists()
    assert not (home / "candidate").exists()
    assert git(checkout, "worktree", "list").count("\n") == 0


@pytest.mark.process
def test_what_a_killed_run_left_is_cleared_by_the_next(checkout: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    git(checkout, "worktree", "add", "--detach", str(home / "base"), "HEAD")
    with two_trees(checkout, "HEAD", home) as (base, _):
        assert (base.source / "file").read_text() == "two"


@pytest.mark.process
def test_a_second_comparison_is_refused_while_one_runs(checkout: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with two_trees(checkout, "HEAD", home), pytest.raises(SmokeError, match="another comparison"), two_trees(checkout, "HEAD", home):
        pass


@pytest.mark.process
def test_an_unknown_commit_is_refused_in_gits_words(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(SmokeError, match="no-such"), two_trees(checkout, "no-such", tmp_path / "home"):
        pass


@pytest.mark.process
def test_the_default_base_is_what_a_change_departs_from(checkout: Path) -> None:
    first, second = git(checkout, "rev-parse", "HEAD~1"), git(checkout, "rev-parse", "HEAD")
    assert default_base(checkout) == first  # on main, nothing changed: the commit before
    (checkout / "src" / "file").write_text("three")
    assert default_base(checkout) == second  # on main, about to commit
    git(checkout, "switch", "-q", "-c", "topic")
    git(checkout, "commit", "-q", "-a", "-m", "three")
    (checkout / "src" / "file").write_text("four")
    git(checkout, "commit", "-q", "-a", "-m", "four")
    assert default_base(checkout) == second  # on a branch: where it left main
