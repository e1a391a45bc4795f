"""Runs plans on a thread of its own, in the order of submission, so that the loop can make the next plan meanwhile.

The thread is a daemon and not an executor's: Python waits for executors' threads when it exits, and a step that hangs would keep the
process alive for ever.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future

from headrace.core.plan import Plan, Result
from headrace.engine.runner.model_runner import ModelRunner

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Seconds that `close` waits for the step in progress."""


class OverlappedRunner:
    """A `ModelRunner` behind a queue. close_timeout_s: seconds that `close` waits for the step in progress."""

    def __init__(self, runner: ModelRunner, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._runner = runner
        self._close_timeout_s = close_timeout_s
        self._steps: queue.SimpleQueue[tuple[Plan, Future[Result]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._compute, name="headrace-step", daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> Future[Result]:
        """Return at once. The ticket's `result` waits for the step and raises the step's error. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        ticket: Future[Result] = Future()
        self._steps.put((plan, ticket))
        return ticket

    def close(self) -> None:
        """Finish the step in progress, drop the steps not begun, end the thread.

        A step that does not end in time is abandoned with a line in the log. The runner below then stays open, since the step uses it.
        """
        if self._closed:
            return
        self._closed = True
        self._drop_not_begun()
        self._steps.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            log.error("a step has not ended %g s after the runner was closed; its thread is left behind", self._close_timeout_s)
            return
        self._runner.close()

    def _drop_not_begun(self) -> None:
        while True:
            try:
                item = self._steps.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].cancel()

    def _compute(self) -> None:
        while (item := self._steps.get()) is not None:
            plan, ticket = item
            if self._closed or not ticket.set_running_or_notify_cancel():
                ticket.cancel()
                continue
            try:
                ticket.set_result(self._runner.execute(plan))
            except BaseException as error:  # the ticket raises it where the step is waited for
                ticket.set_exception(error)
