"""What is prepared for a request before it takes a step's budget, and given back when the request is over.

A `Preparer` makes grammars, loads adapters, fetches KV: on other threads, while the request waits in the scheduler. Each request that is
admitted has an `AdmissionId` of its own, so that a late answer for a request that was cancelled cannot pass for one about its successor
of the same id. All of this runs on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from headrace.core.errors import EngineFatal
from headrace.core.ids import AdmissionId
from headrace.core.load import FailureKind
from headrace.core.request import EngineRequest
from headrace.engine.failures import Failures
from headrace.policy.schedule.prerequisites import check_prerequisite


class Preparer(Protocol):
    """Both are called on the loop's thread and must not block: work is done on another one, which says `satisfied` or `failed`."""

    def begin(self, request: EngineRequest, admission: AdmissionId) -> Mapping[str, float]:
        """What a checked request has to wait for, each with the seconds it may take: a grammar, an adapter, KV from elsewhere.

        Called once for each request the scheduler has room for. Raises a HeadraceError: the request is refused with it, nothing is held
        for it, and `end` is not called.
        """
        ...

    def end(self, admission: AdmissionId) -> None:
        """The request is over, whatever became of it: what `begin` took for it is given back. Called once for each one that returned."""
        ...


class NothingToPrepare:
    """Of engines that have no preparer."""

    def begin(self, request: EngineRequest, admission: AdmissionId) -> Mapping[str, float]:
        return {}

    def end(self, admission: AdmissionId) -> None:
        pass


class Preparations:
    """Admissions whose `begin` has returned and whose `end` was not called yet."""

    def __init__(self, preparer: Preparer, failures: Failures) -> None:
        self._preparer = preparer
        self._failures = failures
        self._open: set[AdmissionId] = set()
        self._num_begun = 0

    def begin(self, request: EngineRequest) -> tuple[AdmissionId, Mapping[str, float]]:
        """Raises what the preparer raises, and ValueError for a prerequisite whose name is the scheduler's own."""
        self._num_begun += 1
        admission = AdmissionId(self._num_begun)
        prerequisites = self._preparer.begin(request, admission)
        self._open.add(admission)
        try:
            for name in prerequisites:
                check_prerequisite(name)
        except Exception:
            self.end([admission])
            raise
        return admission, prerequisites

    def end(self, admissions: Iterable[AdmissionId]) -> None:
        """These requests are over. A preparer that raises is logged, and the rest is ended all the same.

        Raises EngineFatal where the preparer did, after the rest is ended.
        """
        fatal: EngineFatal | None = None
        for admission in admissions:
            self._open.remove(admission)
            try:
                self._preparer.end(admission)
            except EngineFatal as error:
                fatal = fatal or error
            except Exception as error:
                self._failures.note(FailureKind.PREREQUISITE, "what was prepared for a request could not be given back", error)
        if fatal is not None:
            raise fatal

    def end_all(self) -> None:
        """The loop has ended: nothing is waited for any more."""
        self.end(sorted(self._open))
