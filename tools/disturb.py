"""Runs a command on a machine that is busy and stands still now and then. Tests that pass under it depend on no speed of the machine.

    python tools/disturb.py --busy 2 --stop 1-2 -- make test

--busy N        N processes compute in endless loops beside it
--stop MIN-MAX  at random moments all its processes are stopped at once (SIGSTOP), for MIN to MAX seconds, and go on (SIGCONT)

Exits as the command does: with its status, or by the signal that ended it as 128 + its number. It stops the command's own tree alone, and
leaves out what is stopped already: a test that stops a process of its own finds it stopped.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

ENDLESS = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IS_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
LEAVE_S = 10.0
"""Seconds that the command has to end after it was asked to; then its tree is killed."""
STOPPING_S = 1.0
"""Seconds that a process has to stop: one that waits for a disk cannot at once."""


class Disturbance:
    """What is done to a command: stops at random moments, a mean of `every_s` seconds apart.

    num_stops, stopped  how often it was stopped, and which programs how often
    """

    def __init__(self, root: psutil.Process, stop_s: tuple[float, float], every_s: float, seed: int) -> None:
        self._root, self._stop_s, self._every_s = root, stop_s, every_s
        self._draw = random.Random(seed)
        self.num_stops = 0
        self.stopped: Counter[str] = Counter()

    def run(self, is_over: threading.Event) -> None:
        while not is_over.wait(self._draw.expovariate(1 / self._every_s)):
            self.stop_once(is_over)

    def stop_once(self, is_over: threading.Event) -> None:
        seen: list[psutil.Process] = []
        stopped: list[psutil.Process] = []
        try:
            while new := [process for process in self._tree() if process not in seen]:  # some are started while others are stopped
                seen += new
                stopped += [process for process in new if stop(process)]
            self.num_stops += bool(stopped)
            is_over.wait(self._draw.uniform(*self._stop_s))
        finally:
            for process in reversed(stopped):
                with suppress(psutil.Error):
                    self.stopped[process.name()] += 1
                    process.resume()

    def _tree(self) -> list[psutil.Process]:
        """Parents before what they started."""
        with suppress(psutil.Error):
            return [self._root, *self._root.children(recursive=True)]
        return []


def stop(process: psutil.Process) -> bool:
    """Whether it runs no more, and did before. Its parent must have stopped: it could stop the process itself meanwhile."""
    with suppress(psutil.Error):
        if process.status() in (*IS_STOPPED, psutil.STATUS_ZOMBIE):
            return False
        process.suspend()
        until = time.monotonic() + STOPPING_S
        while process.status() not in IS_STOPPED and time.monotonic() < until:
            time.sleep(0.001)
        return True
    return False


@contextmanager
def busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", ENDLESS]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the command to end, then kill what is left of its tree."""
    tree: list[psutil.Process] = []
    with suppress(psutil.Error):
        tree = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in tree:
        with suppress(psutil.Error):
            child.kill()


def disturbed(command: Sequence[str], num_busy: int, stop_s: tuple[float, float] | None, every_s: float, seed: int) -> int:
    """The command's exit status."""
    is_over = threading.Event()
    with busy(num_busy), subprocess.Popen(command) as process:
        disturbance = Disturbance(psutil.Process(process.pid), stop_s or (0.0, 0.0), every_s, seed)
        stopping = threading.Thread(target=disturbance.run, args=[is_over])
        try:
            if stop_s is not None:
                stopping.start()
            status = process.wait()
        finally:
            is_over.set()
            if stopping.ident is not None:
                stopping.join()  # which lets go on what is stopped
            if process.poll() is None:
                end(process)
            print(f"disturb: stopped {disturbance.num_stops} times: {dict(disturbance.stopped.most_common())}", file=sys.stderr)
    return status if status >= 0 else 128 - status


def seconds(text: str) -> tuple[float, float]:
    least, dash, most = text.partition("-")
    if not dash or not 0 < float(least) <= float(most):
        raise ValueError(text)
    return float(least), float(most)


def leave(number: int, frame: FrameType | None) -> None:
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)  # what has to be let go on or ended is, whoever sends another
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="endless loops beside the command")
    parser.add_argument("--stop", type=seconds, metavar="MIN-MAX", help="seconds for which all its processes are stopped")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="mean time between two stops")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs="+", help="after --")
    given = parser.parse_args(arguments)
    for number in ENDS:
        signal.signal(number, leave)
    return disturbed(given.command, given.busy, given.stop, given.every, given.seed)


if __name__ == "__main__":
    sys.exit(main())
