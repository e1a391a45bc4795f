"""Runs an engine in the calling thread until every prompt is answered."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence

from headrace.core.errors import EngineFatal, InvalidRequest, Overloaded, counted
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.loop import Engine
from headrace.llm.adapters import LoRARequest
from headrace.llm.outputs import GenerationFailed, RequestMetrics, RequestOutput, SequenceCollector, prompt_logprob_maps
from headrace.text.assemble import OutputAssembler
from headrace.text.tokenizer import Tokenizer

MAX_IDLE_TURNS = 500
"""Turns without work after which the engine has lost the open sequences."""


class PromptJob:
    def __init__(
        self,
        request: EngineRequest,
        prompt: str | None,
        tokenizer: Tokenizer,
        *,
        lora_request: LoRARequest | None = None,
        grammar_field: str = "grammar",
    ) -> None:
        """grammar_field: the caller's name of the field"""
        self.request = request
        self._grammar_field = grammar_field
        self._tokenizer = tokenizer
        params = request.params
        self.collectors = [
            SequenceCollector(OutputAssembler(tokenizer, params), index, has_logprobs=params.logprobs is not None)
            for index in range(params.n)
        ]
        self.num_open = params.n
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_ids),
            outputs=[collector.output for collector in self.collectors],
            metrics=RequestMetrics(0.0),
            lora_request=lora_request,
        )

    def feed(self, update: SequenceUpdate, engine: Engine) -> int:
        """Returns the number of new tokens."""
        collector = self.collectors[update.index]
        if collector.output.finished:
            return 0
        collector.feed(update)
        metrics = self.output.metrics
        if update.token_ids and metrics.first_token_time is None:
            metrics.first_token_time = time.monotonic()
        if collector.keep_tokens is not None:
            engine.finish(self.request.request_id, update.index, collector.keep_tokens)
        if collector.output.finished:
            self.num_open -= 1
            if not self.num_open:
                self._close()
        return len(update.token_ids)

    def refusal(self, error: Exception) -> Exception:
        return error.at(self._grammar_field) if isinstance(error, InvalidRequest) and error.field == "grammar" else error

    def _close(self) -> None:
        output, first = self.output, self.collectors[0].assembler
        output.finished = True
        output.metrics.finished_time = time.monotonic()
        output.metrics.queue_time_s = first.queue_time_s
        output.num_cached_tokens = first.num_cached_tokens
        if self.request.params.prompt_logprobs is not None:
            items = [item for collector in self.collectors for item in collector.prompt_logprobs]
            output.prompt_logprobs = prompt_logprob_maps(self._tokenizer, self.request.prompt_ids, items)

    @property
    def error(self) -> str | None:
        return next((collector.error for collector in self.collectors if collector.error is not None), None)


class PromptBatch:
    """At most `max_waiting` sequences are in the engine at once.

    The number shrinks when the engine refuses a job for lack of room.
    """

    def __init__(self, engine: Engine, inbox: deque[SequenceUpdate | Rejected], *, max_waiting: int) -> None:
        self._engine = engine
        self._inbox = inbox
        self._max_open = max_waiting
        self._waiting: deque[PromptJob] = deque()
        self._open: dict[RequestId, PromptJob] = {}
        self._num_open = 0

    def run(self, jobs: Sequence[PromptJob], progress: ProgressLine) -> None:
        """No sequence is left in the engine, also after an error.

        Raises the engine's refusal; GenerationFailed for the first failed sequence, once all others are done; EngineFatal.
        """
        self._waiting.extend(jobs)
        idle = 0
        try:
            while self._waiting or self._open:
                self._submit_waiting()
                has_worked = self._engine.turn()
                has_updates = self._handle_updates(progress)
                idle = 0 if has_worked or has_updates else idle + 1
                if idle:
                    self._engine.idle()
                if idle > MAX_IDLE_TURNS:
                    raise EngineFatal(f"the engine rests with {counted(len(self._open), 'request')} open")
        finally:
            self._cancel_open()
            progress.close()
        for number, job in enumerate(jobs):
            if job.error is not None:
                raise GenerationFailed(f"prompt {number}: {job.error}", outputs_of(jobs))

    def _submit_waiting(self) -> None:
        while self._waiting and (not self._open or self._num_open + self._waiting[0].request.params.n <= self._max_open):
            job = self._waiting.popleft()
            job.output.metrics.arrival_time = time.monotonic()
            self._open[job.request.request_id] = job
            self._num_open += job.request.params.n
            self._engine.submit(job.request)

    def _handle_updates(self, progress: ProgressLine) -> bool:
        """Raises the error of a refused request."""
        has_updates = bool(self._inbox)
        while self._inbox:
            message = self._inbox.popleft()
            job = self._open.get(message.request_id)
            if job is None:
                continue
            if isinstance(message, Rejected):
                self._take_back(job, message.error)
                continue
            num_tokens = job.feed(message, self._engine)
            if job.output.finished:
                self._remove(job)
            progress.add(num_tokens, is_finished=job.output.finished)
        return has_updates

    def _take_back(self, job: PromptJob, error: Exception) -> None:
        """Raises other refusals than for lack of room, and that of a job alone."""
        self._remove(job)
        if not isinstance(error, Overloaded) or not self._open:
            raise job.refusal(error)
        self._waiting.appendleft(job)
        self._max_open = self._num_open

    def _remove(self, job: PromptJob) -> None:
        del self._open[job.request.request_id]
        self._num_open -= job.request.params.n

    def _cancel_open(self) -> None:
        failing = isinstance(sys.exc_info()[1], EngineFatal)
        for request_id in self._open:
            self._engine.cancel(request_id)
        self._open.clear()
        while not failing and self._engine.turn():
            pass
        self._inbox.clear()


class ProgressLine:
    def __init__(self, total: int, *, is_on: bool) -> None:
        self._total = total
        self._is_on = is_on and sys.stderr is not None and sys.stderr.isatty()
        self._began = self._shown = time.monotonic()
        self._done = self._tokens = 0

    def add(self, num_tokens: int, *, is_finished: bool) -> None:
        self._done += is_finished
        self._tokens += num_tokens
        now = time.monotonic()
        if self._is_on and (now - self._shown > 0.1 or self._done == self._total):
            self._shown = now
            rate = self._tokens / max(now - self._began, 1e-9)
            print(f"\rPrompts: {self._done}/{self._total}, {rate:.1f} output tokens/s", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._is_on:
            print(file=sys.stderr)


def outputs_of(jobs: Iterable[PromptJob]) -> list[RequestOutput]:
    return [job.output for job in jobs]
