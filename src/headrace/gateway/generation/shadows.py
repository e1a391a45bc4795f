"""Sends copies of requests to the shadow model of their route, and drops the output: its speed and its failures show under real traffic.

A copy is no request of the client's: it is not limited, billed, cached or explained, and nothing of it is in the client's answer.
Only copies find its prefix in an engine's cache: else the tenant's next request to that model would cost less.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import replace
from enum import StrEnum

from headrace.core.clock import Clock
from headrace.core.hashing import TENANT_SALT_BYTES
from headrace.core.ids import RequestId
from headrace.core.request import PriorityClass
from headrace.core.tasks import RunningTasks, end_tasks
from headrace.gateway.access.memory_charges import RequestMemory
from headrace.gateway.generation.call import Call, Ready
from headrace.gateway.generation.progress import raise_if_failed
from headrace.gateway.upstream.generation_request import PrincipalFacts
from headrace.gateway.upstream.served_models import ServedModel
from headrace.observe.logs import LimitedLog
from headrace.observe.metrics import Metrics
from headrace.policy.routing.wishes import server_places

log = logging.getLogger("headrace.gateway")

MAX_COPIES = 8
MAX_COPY_S = 300.0
NO_TENANT = ""

NOT_COPIED = ("logprobs", "prompt_logprobs")
"""Large, and of no use where the output is dropped."""


class ShadowResult(StrEnum):
    ANSWERED = "answered"
    FAILED = "failed"
    SKIPPED = "skipped"
    """MAX_COPIES run, the model has a queue, a half of the memory for prompts is taken, or the client wants none of its servers."""


class ShadowCopies:
    """The copies that run in this process. `close` ends them."""

    def __init__(self, memory: RequestMemory, metrics: Metrics, clock: Clock) -> None:
        self._memory = memory
        self._count = metrics.shadow_requests
        self._log = LimitedLog(log, clock)
        self._tasks = RunningTasks()

    async def close(self) -> None:
        await end_tasks(self._tasks)

    def send(self, ready: Ready) -> None:
        """Returns at once. Nothing is sent for a cache's answer, a continued stream, or an answer of the shadow model itself."""
        call, model = ready.call, ready.call.shadow
        if model is None or ready.cache_tier is not None or call.earlier is not None or model is call.model:
            return
        queue, prompts = model.upstream.queue(PriorityClass.BATCH, model.unsent), self._memory.prompts
        has_server = bool(server_places(model.upstream.server_names, call.parsed.routing))
        is_busy = len(self._tasks) >= MAX_COPIES or (queue is not None and queue.depth > 0)
        if not has_server or is_busy or prompts.left < prompts.limits.total // 2:
            self._count.labels(model.name, ShadowResult.SKIPPED).inc()
            return
        model.users.enter(NO_TENANT)
        task = self._tasks.start(self._run(call, model, call.charges.prompts.num_bytes), "shadow copy")
        task.add_done_callback(lambda _: model.users.leave(NO_TENANT))

    async def _run(self, call: Call, model: ServedModel, num_bytes: int) -> None:
        result = ShadowResult.FAILED
        try:
            async with asyncio.timeout(MAX_COPY_S):
                with self._memory.open(NO_TENANT) as charges:
                    charges.prompts.add(num_bytes)
                    await _answered(call, model)
            result = ShadowResult.ANSWERED
        except Exception as error:  # also a fault of ours ends the copy alone
            self._log.info("a copy of a request failed at the shadow model %s: %s", model.name, type(error).__name__)
        finally:
            self._count.labels(model.name, result).inc()


async def _answered(call: Call, model: ServedModel) -> None:
    """Raises what the upstream raises, and for a failed sequence."""
    request = replace(
        call.request(),
        request_id=RequestId(f"{call.exchange.request_id}-shadow"),
        sampling={name: value for name, value in call.parsed.sampling.items() if name not in NOT_COPIED},
        unsent=None,
        admit=None,
        has_fallback=True,  # a copy waits for no replica
        trace_headers={},
    )
    salt = hashlib.blake2b(call.salt, digest_size=TENANT_SALT_BYTES, person=b"headrace-shadow").digest()
    facts = PrincipalFacts(priority=PriorityClass.BATCH, salt=salt, ceiling=call.reservation.ceiling(call.price))
    stream = (await model.upstream.prepare(request, facts)).stream()
    try:
        while events := await stream.events():
            for event in events:
                if event.finish is not None:
                    raise_if_failed(event.finish, event.error)
    finally:
        await stream.close()
