"""Defines the four kinds of test (CONTRIBUTING.md), and holds each test to what its kind may do.

The guard hears CPython's audit events, and wraps what raises none: sleeps of the main thread, grpc's channels and servers. A forbidden act
is refused where it happens; the test fails also where it swallows the refusal. A thread that a loop on virtual time would have to wait for
fails the test (`virtual_time`). The guard does not see a wait for a lock or a queue with a time limit.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing.util
import re
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from loop_network import use_loop_network
from virtual_time import VirtualTimeLoop, do_sqlite_inline

KINDS = ("pure", "loop", "socket", "process")
"""In the order of what a test may do: each may do what those before it may, in its own kind of time."""

VIRTUAL = ("pure", "loop")

MARK = re.compile(r"\bmark\.(\w+)")

_PROCESS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system", "multiprocessing"})
_SOCKET = frozenset({"socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto", "grpc"})
_REAL_TIME = frozenset({"time.sleep"})
_REFUSED: dict[str, frozenset[str]] = {
    "pure": _PROCESS | _SOCKET | _REAL_TIME,
    "loop": _PROCESS | _SOCKET | _REAL_TIME,
    "socket": _PROCESS,
    "process": frozenset(),
}


class KindBroken(AssertionError):
    """A test does what its kind may not."""


def _slept(seconds: float) -> str:
    """A kernel that another process of the tests compiles just now takes the time that compiling it takes here."""
    compiles = sys._getframe(2).f_globals["__name__"] == "headrace.tensor.kernels.cpu.jit.disk_cache"
    return "time.sleep" if seconds and not compiles and threading.current_thread() is threading.main_thread() else ""


class Guard:
    """One for this process: an audit hook cannot be taken away. kind: of the running test; "": none runs"""

    def __init__(self) -> None:
        self.kind = ""
        self.broken: list[str] = []
        self._has_grpc = False
        sys.addaudithook(self._audit)
        self._watch(time, "sleep", _slept)
        self._watch(multiprocessing.util, "spawnv_passfds", lambda *_: "multiprocessing")
        make_loop = asyncio.new_event_loop
        asyncio.new_event_loop = asyncio.events.new_event_loop = lambda: VirtualTimeLoop() if self.kind in VIRTUAL else make_loop()

    def begin(self, kind: str) -> None:
        self._watch_grpc()
        self.kind, self.broken = kind, []

    def end(self) -> None:
        """Raises KindBroken for what was refused since `begin`."""
        self.kind, broken, self.broken = "", self.broken, []
        if broken:
            raise KindBroken("; ".join(dict.fromkeys(broken)))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For what starts a server that many tests share, in the setup of the first of them."""
        kind, self.kind = self.kind, ""
        try:
            yield
        finally:
            self.kind = kind

    def check(self, act: str, detail: str = "") -> None:
        if self.kind and act in _REFUSED[self.kind]:
            calls = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack() if frame.filename != __file__]
            message = f"a test of the kind {self.kind} may not do this: {act} {detail}".rstrip() + f", called at {' > '.join(calls[-4:])}"
            self.broken.append(message)
            raise KindBroken(message)

    def _audit(self, event: str, args: Sequence[Any]) -> None:
        if self.kind and event in _REFUSED["pure"]:
            self.check(event, repr(args[-1])[:120])

    def _watch_grpc(self) -> None:
        if self._has_grpc or "grpc" not in sys.modules:
            return
        self._has_grpc = True
        import grpc
        import grpc.aio

        for module in (grpc, grpc.aio):
            for name in ("insecure_channel", "secure_channel", "server"):
                self._watch(module, name, lambda *_: "grpc")

    def _watch(self, owner: Any, name: str, act: Callable[..., str]) -> None:
        """Check each call of a function. act: of its positional arguments; "": it is allowed"""
        function = getattr(owner, name)

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if self.kind and (done := act(*args)):
                self.check(done, f"{name}{args!r}"[:120])
            return function(*args, **kwargs)

        setattr(owner, name, checked)


guard = Guard()


def kind_of(node: pytest.Item | pytest.Collector) -> str:
    """The kind that the node, or else the nearest one around it, names; "" where none does. Of several at one node the last in KINDS."""
    for around in reversed(node.listchain()):
        named = [kind for kind in KINDS if any(mark.name == kind for mark in around.own_markers)]
        if named:
            return named[-1]
    return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kinds", help="run the tests of these kinds alone, such as pure,loop")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that names kinds, and none of those that are to run, is not imported."""
    wanted = config.getoption("--kinds")
    if not wanted or not collection_path.match("test_*.py"):
        return None
    named = set(MARK.findall(collection_path.read_text(encoding="utf-8"))) & set(KINDS)
    return True if named and not named & set(wanted.split(",")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unnamed = [item.nodeid for item in items if not kind_of(item)]
    if unnamed:
        shown = "\n  ".join(unnamed[:20])
        raise pytest.UsageError(f"{len(unnamed)} tests name no kind ({', '.join(KINDS)}; see tests/support/kinds.py):\n  {shown}")
    for item in items:
        if kind_of(item) == "pure" and inspect.iscoroutinefunction(getattr(item, "obj", None)):
            raise pytest.UsageError(f"{item.nodeid} is asynchronous, so that it is of the kind loop, socket or process, and not pure")
    if wanted := config.getoption("--kinds"):
        left_out = [item for item in items if kind_of(item) not in wanted.split(",")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if kind_of(item) in wanted.split(",")]


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if kind_of(item) == "loop":
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    kind = kind_of(item)
    item.user_properties.append(("kind", kind))
    guard.begin(kind)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    try:
        return (yield)
    finally:
        guard.end()


@pytest.fixture(autouse=True)
def sqlite_without_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a test on virtual time: its loop could not wait for a file's thread."""
    if kind_of(request.node) in VIRTUAL:
        do_sqlite_inline(monkeypatch)


@pytest.fixture(autouse=True)
def network_of_the_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind_of(request.node) == "loop":
        use_loop_network(monkeypatch)


class _Tally:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = str(dict(report.user_properties).get("kind", ""))
        self.seconds[kind] += report.duration
        self.counts[kind] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counted = [f"{kind} {self.counts[kind]} in {self.seconds[kind]:.0f} s" for kind in KINDS if self.counts[kind]]
        terminalreporter.write_line(f"tests by kind: {', '.join(counted) or 'none'}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Tally())
