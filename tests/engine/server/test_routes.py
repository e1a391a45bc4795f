"""Tests random lives of routes against a plain list: what is open here is open there, under both of its names."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.ids import RequestId
from headrace.engine.server.routes import Routes
from headrace.wire.handles import Handle

pytestmark = pytest.mark.pure

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
