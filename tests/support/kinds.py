"""The four kinds of test, and the guard that holds each test to what its kind may do.

pure     no socket, no process, no sleep; files of its own folder alone
loop     asyncio on virtual time (`virtual_time`): no socket but of the loop's own network (`loop_network`), no grpc, no process; time
         passes only while everything waits
socket   loopback, grpc and threads inside this process, in real time: waits for events, asserts no seconds
process  starts another process, or stops one; these run one after the other

A test names its kind by a marker, of its own or of its module. The guard sees what CPython's audit events tell, and what makes grpc's
channels and servers; it refuses that where it happens, and fails the test where the refusal was swallowed.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
from loop_network import use_loop_network
from virtual_time import VirtualTimeLoop, do_sqlite_inline

KINDS = ("pure", "loop", "socket", "process")
"""In the order of what a test may do: each may do what those before it may, in its own kind of time."""

_PROCESS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec"})
_SOCKET = frozenset({"socket.bind", "socket.connect", "socket.getaddrinfo"})
_GRPC = "grpc"
_REFUSED: dict[str, frozenset[str]] = {
    "pure": _PROCESS | _SOCKET | {"time.sleep", _GRPC},
    "loop": _PROCESS | _SOCKET | {"time.sleep", _GRPC},
    "socket": _PROCESS,
    "process": frozenset(),
}


class KindBroken(AssertionError):
    """A test does what its kind may not."""


class Guard:
    """The audit hook of this process: hooks cannot be taken away, so that there is one. kind: of the running test; "": none runs"""

    def __init__(self) -> None:
        self.kind = ""
        self.broken: list[str] = []
        self._has_grpc = False
        sys.addaudithook(self._heard)

    def begin(self, kind: str) -> None:
        self._watch_grpc()
        self.kind, self.broken = kind, []

    def end(self) -> None:
        """Raises KindBroken for what was refused since `begin`."""
        self.kind, broken, self.broken = "", self.broken, []
        if broken:
            raise KindBroken("; ".join(broken))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For what starts a server that many tests share, in the setup of the first of them."""
        kind, self.kind = self.kind, ""
        try:
            yield
        finally:
            self.kind = kind

    def check(self, event: str, detail: str = "") -> None:
        if self.kind and event in _REFUSED[self.kind]:
            said = f"a test of the kind {self.kind} may not do this: {event} {detail}".rstrip()
            self.broken.append(said)
            raise KindBroken(said)

    def _heard(self, event: str, args: Sequence[Any]) -> None:
        if not self.kind or event not in _REFUSED["pure"] or (event == "time.sleep" and not args[0]):
            return
        self.check(event, repr(args[-1])[:120])

    def _watch_grpc(self) -> None:
        """grpc's sockets are made in C, and no audit event tells of them."""
        if self._has_grpc or "grpc" not in sys.modules:
            return
        self._has_grpc = True
        import grpc
        import grpc.aio

        for module in (grpc, grpc.aio):
            for name in ("insecure_channel", "secure_channel", "server"):
                setattr(module, name, self._checked(getattr(module, name), f"grpc.{name}"))

    def _checked(self, make: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(make)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check(_GRPC, name)
            return make(*args, **kwargs)

        return checked


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without = [item.nodeid for item in items if not kind_of(item)]
    if without:
        shown = "\n  ".join(without[:20])
        raise pytest.UsageError(f"{len(without)} tests name no kind ({', '.join(KINDS)}; see tests/support/kinds.py):\n  {shown}")
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
    if kind_of(request.node) == "loop":
        do_sqlite_inline(monkeypatch)


@pytest.fixture(autouse=True)
def network_of_the_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a test on virtual time: its servers and connections stay within its loop."""
    if kind_of(request.node) == "loop":
        use_loop_network(monkeypatch)


class _Tally:
    """Number and seconds of each kind, of the process that reports."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = str(dict(report.user_properties).get("kind", ""))
        self.seconds[kind] += report.duration
        self.counts[kind] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        said = [f"{kind} {self.counts[kind]} in {self.seconds[kind]:.0f} s" for kind in KINDS if self.counts[kind]]
        terminalreporter.write_line(f"tests by kind: {', '.join(said) or 'none'}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Tally())
