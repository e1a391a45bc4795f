"""Gives every test a time limit, and the run the flag `--no-torch`.

A test that hangs fails, with the stacks of its threads and of the processes it started.

pytest-timeout interrupts the test and shows the stacks of its own threads. Added here:

- a slow test's limit, unless the test names its own with `@pytest.mark.timeout(SECONDS)`;
- the stacks of child processes: Python writes them at SIGABRT, which PYTHONFAULTHANDLER turns on in every child;
- an end of the process that runs it, with stacks, where a call into C never returns and no signal can interrupt it.

SIGHUP has its default action in what tests start, however the run itself was started. HEADRACE_STATE is a temporary folder, so that no test
reads this user's own keys.

The process log that a command sets up in a test's own process ends with the test.

With `--no-torch` importing torch fails, which holds the tests of `make test-control` to the control side.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TextIO

import psutil
import pytest
from hypothesis import settings

from headrace.observe.logs import LogHandler

pytest_plugins = ("kinds", "figures", "quarantine")

SLOW_LIMIT_S = 1500
"""Seconds that a test marked slow may take, instead of the `timeout` in pyproject.toml."""

GRACE_S = 60
"""Seconds after its limit at which a test that could not be interrupted ends its process: the whole run, or one process of several, which
pytest-xdist replaces."""

STACKS_S = 3.0
"""Seconds that a child process has to write its stacks."""

settings.register_profile("free", deadline=None)  # an example that a busy machine delays is no failure
settings.register_profile("headrace", settings.get_profile("free"), derandomize=True, database=None)
settings.load_profile("headrace")

_stderr = pytest.StashKey[TextIO]()
_state = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-torch", action="store_true", help="fail whatever imports torch")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-torch"):
        sys.modules["torch"] = None  # type: ignore[assignment]  # what the import system takes for "not to be imported"
    os.environ["PYTHONFAULTHANDLER"] = "1"
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup. Servers that tests start must not inherit that; a handler is not
        signal.signal(signal.SIGHUP, lambda *_: None)
    config.stash[_stderr] = os.fdopen(os.dup(2), "w")
    config.stash[_state] = os.environ["HEADRACE_STATE"] = tempfile.mkdtemp(prefix="headrace-state-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_state], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Importing makes no garbage to look for."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze_heap()
        gc.enable()


def freeze_heap() -> None:
    """What there is by now stays: each full collection would walk it again, torch's objects among it.

    Called when all is imported, and after each file of tests, since what it imported, read and cached stays too. A gateway that is idle
    collects garbage twice, and on virtual time nearly every request is followed by that.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """What earlier tests of this process left is not walked by the collections of a module that measures times."""
    freeze_heap()
    yield
    gc.unfreeze()
    freeze_heap()


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    if any(isinstance(handler, LogHandler) for handler in root.handlers):
        root.handlers[:], root.level = handlers, level


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """A supervisor that ends leaves them ignored, and what later tests start would inherit that."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0])
    return float(item.config.getoption("timeout") or item.config.getini("timeout") or 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
    if limit := limit_s(item):
        faulthandler.dump_traceback_later(limit + GRACE_S, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if nextitem is None or nextitem.path != item.path:
            freeze_heap()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        started = [child for child in psutil.Process().children(recursive=True) if _belongs(child, item, call.start)]
        report.sections += [(f"stacks of process {child.pid}", stacks(child)) for child in reversed(started)]
    return report


def _belongs(child: psutil.Process, item: pytest.Item, start: float) -> bool:
    """Whether the test started the process, or uses it through a fixture: servers of other tests live on."""
    owners = [getattr(value, "process", None) for value in getattr(item, "funcargs", {}).values()]
    pids = {owner.pid for owner in owners if owner is not None}
    try:
        return child.create_time() >= start - 1 or bool(pids & {child.pid, *(parent.pid for parent in child.parents())})
    except psutil.Error:
        return False


def stacks(child: psutil.Process) -> str:
    """End a process by SIGABRT; what it wrote to its stderr then, and its command."""
    try:
        command = " ".join(child.cmdline())
        with _open_stderr(child.pid) as stderr:
            child.send_signal(signal.SIGABRT)
            psutil.wait_procs([child], timeout=STACKS_S)
            return f"{command}\n{stderr.read() or ''}"
    except (OSError, psutil.Error) as error:
        return f"cannot be read: {error}"


def _open_stderr(pid: int) -> TextIO:
    """The reading side of another process's stderr, from now on: of a file after what is in it, of a pipe without waiting."""
    path = Path(f"/proc/{pid}/fd/2")
    opened = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8", errors="replace")
    if stat.S_ISREG(path.stat().st_mode):
        opened.seek(0, os.SEEK_END)
    return opened
