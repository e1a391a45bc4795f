"""Prepares resources that a request needs before it takes a step's budget.

Each request has its own `PreparationId`, so that a late answer for a cancelled request is not taken for one of the same request id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol

from headrace.core.errors import EngineFatal, InvalidRequest, Unavailable
from headrace.core.ids import PreparationId
from headrace.core.load import FailureKind
from headrace.core.request import EngineRequest
from headrace.engine.recovery import Failures
from headrace.policy.schedule.arrival import check_prerequisite


class Preparer(Protocol):
    """All methods are called on the loop's thread and must not block: the work is done on another thread."""

    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> Mapping[str, float]:
        """Returns each prerequisite with its seconds. A HeadraceError refuses the request, and `end` is not called."""
        ...

    def end(self, preparation_id: PreparationId) -> None: ...

    def close(self) -> None: ...


class Preparers:
    """The preparers of one engine, as one: a request may need several. What none of them prepares is refused by name."""

    def __init__(self, grammars: Preparer | None, adapters: Preparer | None) -> None:
        self._grammars, self._adapters = grammars, adapters
        self._preparers = [each for each in (grammars, adapters) if each is not None]

    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> Mapping[str, float]:
        if request.grammar is not None and self._grammars is None:
            raise InvalidRequest("grammar", "none: this engine compiles no grammars", request.grammar.kind.value)
        if request.adapter is not None and self._adapters is None:
            raise Unavailable(f"this engine serves the base model only, not {request.adapter}; the request can be sent again")
        needs: dict[str, float] = {}
        with ExitStack() as unless_begun:
            for each in self._preparers:
                needs.update(each.begin(request, preparation_id))
                unless_begun.callback(each.end, preparation_id)
            unless_begun.pop_all()
        return needs

    def end(self, preparation_id: PreparationId) -> None:
        with ExitStack() as stack:
            for each in self._preparers:
                stack.callback(each.end, preparation_id)

    def close(self) -> None:
        with ExitStack() as stack:
            for each in self._preparers:
                stack.callback(each.close)


class Preparations:
    def __init__(self, preparer: Preparer, failures: Failures) -> None:
        self._preparer = preparer
        self._failures = failures
        self._open: set[PreparationId] = set()
        self._num_begun = 0

    def begin(self, request: EngineRequest) -> tuple[PreparationId, Mapping[str, float]]:
        self._num_begun += 1
        preparation_id = PreparationId(self._num_begun)
        prerequisites = self._preparer.begin(request, preparation_id)
        self._open.add(preparation_id)
        try:
            for name in prerequisites:
                check_prerequisite(name)
        except Exception:
            self.end([preparation_id])
            raise
        return preparation_id, prerequisites

    def end(self, preparation_ids: Iterable[PreparationId]) -> None:
        """An error of the preparer is logged, and the others are ended all the same, except that EngineFatal is raised at last."""
        fatal: EngineFatal | None = None
        for preparation_id in preparation_ids:
            self._open.remove(preparation_id)
            try:
                self._preparer.end(preparation_id)
            except EngineFatal as error:
                fatal = fatal or error
            except Exception as error:
                self._failures.note(FailureKind.PREREQUISITE, "what was prepared for a request could not be given back", error)
        if fatal is not None:
            raise fatal

    def close(self) -> None:
        try:
            self.end(sorted(self._open))
        finally:
            self._preparer.close()
