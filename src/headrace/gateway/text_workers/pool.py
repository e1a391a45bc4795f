"""Assigns jobs to text workers: in fair order, within bounds, and cancelled when the client leaves.

A running job that is cancelled costs its worker if it is heavy; else its answer is dropped. Workers may be replaced while jobs run: former
ones finish what they have.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from headrace.core.clock import Clock
from headrace.core.errors import CheckpointError, HeadraceError, InvalidRequest, Overloaded, TextQueueFull, Unavailable
from headrace.core.tasks import end_tasks
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.frames import HOST_LOST, Worker, Workers
from headrace.gateway.text_workers.limits import MIB, JobLimits
from headrace.gateway.text_workers.queue import JobQueue, QueuedJob
from headrace.observe.metrics import TextReading

log = logging.getLogger("headrace.gateway")

DOWN = "The processes that read prompts cannot be started now; it can be sent again."
LOST = "The process that read this prompt was lost; it can be sent again."
CROWDED_OUT = "This key has more requests waiting for a text worker than any other; its newest are refused."
RETRY_S = 0.5
CLOSE_CHECK_S = 0.05

FAULT = "If short ones meet this too, the model's chat template is at fault: report it to the server's operator."

Done = tuple[frames.AnyAnswer, memoryview]

MAX_QUEUE_BYTES = 64 << 20
"""Bytes of the waiting jobs below 64 KiB, and as many of the larger ones."""


class WorkerFault(HeadraceError):
    """Clients get a fixed sentence, the log says more."""


@dataclass(eq=False, slots=True)
class TextJob:
    """One job, from `submit` to its answer.

    field     the request's field, for refusals
    is_late    the job's wall time is over
    is_killed  the worker is being killed; its answer may still arrive
    """

    data: bytes
    name: str
    field: str
    future: asyncio.Future[Done]
    limits: JobLimits
    is_waiting: bool = True
    worker: Worker | None = None
    began_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    is_late: bool = False
    is_killed: bool = False


class TextPool:
    """Assigns the jobs of one gateway to its text workers.

    num_killed  jobs whose worker ended, by reason: cpu, memory, time (over a limit), left (the client left), lost (ended from outside)
    busy_s      seconds with a job, summed over workers
    """

    def __init__(self, workers: Workers, *, max_workers: int, max_queue: int, clock: Clock = time.monotonic) -> None:
        self._workers = workers
        self.max_workers = max_workers
        self._queue: JobQueue[TextJob] = JobQueue(max_jobs=max_queue, max_bytes=MAX_QUEUE_BYTES)
        self._clock = clock
        self._idle: list[Worker] = []
        self._running: dict[Worker, TextJob] = {}
        self._killed: set[Worker] = set()  # without a job, sent a kill, not ended yet
        self._former: set[Worker] = set()  # of a source that was replaced, not ended yet; those with a job are in `_running` too
        self._closing: dict[asyncio.Task[None], Workers] = {}  # sources that were replaced, each with the task that closes it
        self._is_down = False  # no worker is left, and none could be started
        self._logged = ""  # why none could be started the last time
        self._starts: set[asyncio.Task[None]] = set()
        self._num_starting = 0
        self._is_closed = False
        self.num_refused = 0
        self.num_killed: Counter[str] = Counter()
        self.busy_s = 0.0

    async def __aenter__(self) -> TextPool:
        await self._workers.start()
        for _ in range(self.max_workers):
            self._start_worker()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_closed = True
        for start in self._starts:
            start.cancel()
        for job in list(self._running.values()):
            self._finish(job)
        await end_tasks(self._closing)
        for workers in (*self._closing.values(), self._workers):
            await workers.close()

    def change(self, max_queue: int) -> None:
        """A lower bound takes out no job that waits."""
        self._queue.change(max_queue)

    def replace(self, workers: Workers, *, max_workers: int) -> None:
        """Running jobs end at their present workers."""
        former, self._workers, self.max_workers = self._workers, workers, max_workers
        self._former |= {*self._idle, *self._running, *self._killed}
        for worker in self._idle:
            worker.kill()
        self._idle.clear()
        self._killed.clear()
        task = asyncio.get_running_loop().create_task(self._close_former(former, set(self._starts)), name="former text workers")
        self._closing[task] = former
        while self._num_current < max_workers:
            self._start_worker()

    async def _close_former(self, workers: Workers, starts: Collection[asyncio.Task[None]]) -> None:
        """starts: tasks that may still be getting a former worker"""
        if starts:
            await asyncio.wait(starts)
        while self._former:
            await asyncio.sleep(CLOSE_CHECK_S)
        await workers.close()
        task = asyncio.current_task()
        assert task is not None
        del self._closing[task]

    @property
    def _num_current(self) -> int:
        return len(self._idle) + len(self._running.keys() - self._former) + len(self._killed) + self._num_starting

    @property
    def reason(self) -> str:
        """In words that clients may see; empty: prompts can be read."""
        return self._workers.reason or ("no process to read prompts can be started" if self._is_down else "")

    @property
    def failures(self) -> Mapping[str, CheckpointError]:
        return self._workers.failures

    def reading(self) -> TextReading:
        queue, killed = self._queue, dict(self.num_killed)
        return TextReading(len(queue), queue.num_bytes, len(self._running), self.num_refused, killed, self.busy_s)

    def submit(self, job: frames.WorkerJob, tail: bytes | memoryview = b"", *, tenant: str, field: str) -> asyncio.Future[Done]:
        """Cancelling the future cancels the job. field: named by errors when the job exceeds a limit. Raises Overloaded when the queue is
        full, and Unavailable while no worker can be started.
        """
        if self._is_down:
            raise Unavailable(DOWN)
        data = frames.frame(job, tail)
        text_job = TextJob(data, type(job).__name__, field, asyncio.get_running_loop().create_future(), JobLimits(len(data)))
        queued = QueuedJob(text_job, tenant, len(data), text_job.limits.is_heavy)
        try:
            shed = self._queue.push(queued)
        except Overloaded:
            self.num_refused += 1
            raise
        for other in shed:
            self.num_refused += 1
            other.job.is_waiting = False
            if not other.job.future.done():
                other.job.future.set_exception(TextQueueFull(CROWDED_OUT))
        text_job.future.add_done_callback(partial(self._given_up, queued))
        self._dispatch()
        return text_job.future

    def parse_body(self, path: str, body: bytes, *, tenant: str) -> asyncio.Future[Done]:
        """The answer's tail is JSON. Raises Overloaded, Unavailable."""
        return self.submit(frames.ParseBody(path), body, tenant=tenant, field="body")

    def check(self) -> None:
        """Assert that every worker is idle, or has exactly one job, or is about to end."""
        self._queue.check()
        assert len(self._idle) == len(set(self._idle))
        assert not set(self._idle) & set(self._running)
        assert all(job.worker is worker for worker, job in self._running.items())
        assert not self._killed & {*self._idle, *self._running}
        assert not self._former & {*self._idle, *self._killed}
        assert self._num_current == self.max_workers

    # -- workers -----------------------------------------------------------------------------------------------------------------

    def answered(self, worker: Worker, answer: frames.AnyAnswer, tail: memoryview) -> None:
        job = self._running.pop(worker)
        self._finish(job)
        if job.is_killed:  # the kill has not arrived yet, and would hit the next job
            self.num_killed["time" if job.is_late else "left"] += 1
            if worker not in self._former:
                self._killed.add(worker)
        elif worker in self._former:
            worker.kill()
        elif answer.is_last:
            self._start_worker()
        else:
            self._idle.append(worker)
        if not job.future.done():
            self._resolve(job, answer, tail)
        self._dispatch()

    def ended(self, worker: Worker, number: int) -> None:
        job = self._running.pop(worker, None)
        if job is not None:
            self._finish(job)
            self._explain(job, number)
        if worker in self._former:
            self._former.remove(worker)
        elif job is not None:
            self._start_worker()
        elif worker in self._killed:
            self._killed.remove(worker)
            self._start_worker()
        elif worker in self._idle:
            self._idle.remove(worker)
            self._start_worker(delay_s=RETRY_S)  # it ended without a job, and the next may end at once too: wait

    def _start_worker(self, delay_s: float = 0.0) -> None:
        if not self._is_closed:
            start = asyncio.get_running_loop().create_task(self._add_worker(delay_s))
            self._starts.add(start)
            self._num_starting += 1
            start.add_done_callback(self._starts.discard)

    async def _add_worker(self, delay_s: float) -> None:
        while True:
            await asyncio.sleep(delay_s)
            if self._num_current > self.max_workers:
                self._num_starting -= 1
                return
            source = self._workers
            try:
                worker = await source.add(self)
                if source is self._workers:
                    break
                self._former.add(worker)
                worker.kill()
            except OSError as error:
                self._log_no_worker(str(error.strerror))
                delay_s = RETRY_S
                if self._num_starting == self.max_workers:
                    self._refuse_waiting()
        self._is_down = False
        self._logged = ""
        self._num_starting -= 1
        self._idle.append(worker)
        self._dispatch()

    def _log_no_worker(self, reason: str) -> None:
        """Equal reasons are logged once, since a start is tried every RETRY_S seconds."""
        if reason != self._logged:
            self._logged = reason
            log.warning("no text worker could be started: %s", reason)

    # -- jobs --------------------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while self._idle:
            num_heavy = sum(job.limits.is_heavy for worker, job in self._running.items() if worker not in self._former)
            queued = self._queue.pop(may_be_heavy=num_heavy < max(1, self.max_workers - 1))
            if queued is None:
                return
            job = queued.job
            job.is_waiting = False
            if job.future.done():  # cancelled, and its callback has not run yet
                continue
            job.worker = worker = self._idle.pop()
            job.began_s = self._clock()
            self._running[worker] = job
            job.timer = asyncio.get_running_loop().call_later(job.limits.wall_s, self._late, job)
            worker.send(job.data)
            job.data = b""

    def _refuse_waiting(self) -> None:
        self._is_down = True
        while (queued := self._queue.pop(may_be_heavy=True)) is not None:
            queued.job.is_waiting = False
            if not queued.job.future.done():
                queued.job.future.set_exception(Unavailable(DOWN))

    def _given_up(self, queued: QueuedJob[TextJob], future: asyncio.Future[Done]) -> None:
        if not future.cancelled():
            return
        job = queued.job
        if job.is_waiting:
            job.is_waiting = False
            self._queue.remove(queued)
        elif job.timer is not None and job.limits.is_heavy:
            self._kill(job)

    def _late(self, job: TextJob) -> None:
        job.is_late = True
        self._kill(job)

    def _kill(self, job: TextJob) -> None:
        assert job.worker is not None
        job.is_killed = True
        job.worker.kill()

    def _finish(self, job: TextJob) -> None:
        self.busy_s += self._clock() - job.began_s
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None

    def _resolve(self, job: TextJob, answer: frames.AnyAnswer, tail: memoryview) -> None:
        match answer:
            case frames.JobRefused():
                job.future.set_exception(frames.error_of(answer))
            case frames.NoMemory():
                job.future.set_exception(self._exceeded(job, "memory"))
            case frames.Failed():
                log.error("a text worker failed at %s: %s", job.name, answer.detail)
                job.future.set_exception(WorkerFault(answer.detail))
            case _:
                job.future.set_result((answer, tail))

    def _explain(self, job: TextJob, number: int) -> None:
        if job.future.cancelled():
            self.num_killed["left"] += 1
        elif number == HOST_LOST or (number in (0, signal.SIGKILL) and not job.is_late):  # no limit of the job was met: ended from outside
            self.num_killed["lost"] += 1
            job.future.set_exception(Unavailable(LOST))
        elif not job.future.done():
            reason = "time" if job.is_late else "cpu" if number == signal.SIGPROF else "memory"
            job.future.set_exception(self._exceeded(job, reason))

    def _exceeded(self, job: TextJob, reason: str) -> InvalidRequest:
        """400, since limits grow with the request, and a retry would exceed them again."""
        limits = job.limits
        spent = {
            "cpu": f"{limits.cpu_s:.3g} s of CPU time",
            "time": f"{limits.wall_s:.3g} s",
            "memory": f"{limits.memory_bytes // MIB} MiB of memory",
        }[reason]
        self.num_killed[reason] += 1
        log.warning("a text worker met its bound at %s (%d bytes): %s", job.name, limits.num_bytes, spent)
        limit = f"what this server can read within {spent}, its bound for a request of {limits.num_bytes} bytes"
        return InvalidRequest(job.field, limit, None, "Send a shorter one. " + FAULT)
