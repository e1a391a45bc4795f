"""Measures what streams that can be resumed cost the gateway: the ids of their events, and keeping the streams at their ends.

    python -m bench.resume_cost [--rounds 300] [--streams 4000]   -> bench/results/resume-cost.json

event_ns  time to encode one chunk of text with and without an id, taking turns; the lowest of all rounds, since others use the machine too
kept_us   CPU time of all threads per stream that is kept, entry of 1,700 bytes (about 200 tokens), by store
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import timeit
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from headrace.core.ids import RequestId
from headrace.gateway.generation.kept_streams import FORM, KeptStream, KeptStreams
from headrace.gateway.http.sse import EventLog
from headrace.gateway.stores.guard import GuardedStore
from headrace.gateway.stores.sqlite import SqliteStore
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import StoreLimits
from headrace.gateway.surfaces.chat import ChatAnswer, ChatRequest
from headrace.gateway.upstream.seam import OutputEvent
from headrace.lab.environment import environment
from headrace.lab.report import write_json
from headrace.observe.store_metrics import ResumeMetrics

RESULT = Path(__file__).with_name("results") / "resume-cost.json"
ANSWER_ID = RequestId("0" * 24)
EVENTS = 2000
PLENTY = StoreLimits(entry=1 << 20, total=1 << 30, tenant_share=lambda: 1.0)
KEPT = KeptStream(form=FORM, tenant="default", body=b"d" * 16, created=1, num_sequences=1, entries=b"e" * 800, state=b"s" * 900)


def event_ns(has_ids: bool) -> float:
    log = EventLog(ANSWER_ID, 1) if has_ids else None
    model = SimpleNamespace(upstream=SimpleNamespace(fingerprint="fp_0"))
    call = SimpleNamespace(answer_id=ANSWER_ID, created=1, shown_model="m", model=model, memory=None)
    ready = SimpleNamespace(call=call, prepared=SimpleNamespace(prompts=[None]), event_log=log, fitted=None)
    answer = ChatAnswer((ChatRequest(messages=[], stream=True), None), cast(Any, ready))
    event = OutputEvent(0, " hello", 1, 5)
    b"".join(answer.encode_events((event,)))  # the opening
    return 1e9 * timeit.timeit(lambda: b"".join(answer.encode_events((event,))), number=EVENTS) / EVENTS


async def kept_us(path: str, num_streams: int) -> float:
    store = GuardedStore(SqliteStore(path, PLENTY, time.time), "streams")
    streams = KeptStreams(store, metrics=ResumeMetrics(CollectorRegistry()))
    began = time.process_time()
    for number in range(num_streams):
        streams.keep(RequestId(f"{number:024x}"), KEPT)
        if number % 20 == 0:
            await asyncio.sleep(0)
    while streams.num_writing:
        await asyncio.sleep(0.001)
    used = time.process_time() - began
    await store.close()
    return 1e6 * used / num_streams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--streams", type=int, default=4000)
    given = parser.parse_args()
    rounds = [(event_ns(False), event_ns(True)) for _ in range(given.rounds)]
    without, with_ids = (min(column) for column in zip(*rounds, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: asyncio.run(kept_us(path, given.streams)) for name, path in (("memory", IN_MEMORY), ("file", f"{folder}/store.db"))}
    found = {
        "event_ns": {"without_ids": round(without), "with_ids": round(with_ids)},
        "kept_us": {name: round(value, 1) for name, value in kept.items()},
        "environment": environment(),
    }
    write_json(RESULT, found)
    print(found["event_ns"], found["kept_us"])


if __name__ == "__main__":
    main()
