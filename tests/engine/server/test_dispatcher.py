"""Tests the bridge from the engine's thread to the asyncio loop, while that loop is being closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.ids import RequestId
from headrace.engine.server.dispatcher import AsyncioOutbox, Routes, call_unless_closed
from headrace.wire.service import Handle

pytestmark = pytest.mark.pure


class ClosingLoop:
    """An asyncio loop that is closed between the moment one asks and the moment one calls."""

    def __init__(self, *, is_closed: bool) -> None:
        self._is_closed = is_closed
        self.num_calls = 0

    def is_closed(self) -> bool:
        return self._is_closed and self.num_calls > 0

    def call_soon_threadsafe(self, *_: Any) -> None:
        self.num_calls += 1
        raise RuntimeError("Event loop is closed")


def test_updates_for_a_loop_that_is_just_closing_are_dropped() -> None:
    loop: Any = ClosingLoop(is_closed=True)
    AsyncioOutbox(loop)([])
    assert loop.num_calls == 1


def test_another_error_of_the_loop_is_not_taken_for_its_end() -> None:
    loop: Any = ClosingLoop(is_closed=False)
    with pytest.raises(RuntimeError):
        call_unless_closed(loop, print, None)


def test_a_real_loop_takes_calls_until_it_is_closed() -> None:
    loop, heard = asyncio.new_event_loop(), list[int]()
    call_unless_closed(loop, heard.append, 1)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    call_unless_closed(loop, heard.append, 2)
    assert heard == [1]


STREAMS = st.sampled_from(["a", "b"])
REQUESTS = st.integers(0, 4).map(lambda number: RequestId(f"r{number}"))


class RoutesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.routes: Routes[str] = Routes()
        self.open: dict[RequestId, tuple[str, Handle, set[int]]] = {}
        self.next_handle = 1

    @rule(stream=STREAMS, request_id=REQUESTS, n=st.integers(1, 3))
    def submit(self, stream: str, request_id: RequestId, n: int) -> None:
        handle = Handle(self.next_handle)
        if request_id in self.open:
            with pytest.raises(ValueError):
                self.routes.open(stream, handle, request_id, 0, range(n))
            return
        self.next_handle += 1
        self.routes.open(stream, handle, request_id, 0, range(n))
        self.open[request_id] = (stream, handle, set(range(n)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), index=st.integers(0, 2))
    def sequence_ends(self, data: st.DataObject, index: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        route = self.routes.of_request(request_id)
        assert route is not None
        self.routes.sequence_ended(route, index)
        self.open[request_id][2].discard(index)
        if not self.open[request_id][2]:
            del self.open[request_id]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        stream, handle, _ = self.open.pop(request_id)
        route = self.routes.of_handle(stream, handle)
        assert route is not None
        self.routes.close(route)
        self.routes.close(route)

    @rule(stream=STREAMS)
    def hang_up(self, stream: str) -> None:
        for route in self.routes.of_stream(stream):
            self.routes.close(route)
        self.open = {request_id: entry for request_id, entry in self.open.items() if entry[0] != stream}

    @invariant()
    def both_sides_agree(self) -> None:
        self.routes.check()
        assert len(self.routes) == len(self.open)
        for request_id, (stream, handle, running) in self.open.items():
            route = self.routes.of_request(request_id)
            assert route is self.routes.of_handle(stream, handle)
            assert route is not None
            assert route.running == running


RoutesMachine.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=25)
TestRoutes = RoutesMachine.TestCase
