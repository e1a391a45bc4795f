"""Runs an engine process on the real wire whose sequences all say the same text, one token per second each.

    python engine.py FILE     {"address", "said": [ids], "vocab_size", "num_streams", "frames_per_second", "commits": path}

Nothing is said before `num_streams` requests are here. Then second for second every sequence gets its next token: with one frame per
second all in the same instant, with F frames a share of 1 / F of them at a time. At the end `commits` holds, for every request id, the
moments (seconds of CLOCK_MONOTONIC, which all processes share) at which its tokens were handed to the wire.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from headrace.core.adapters import AdapterSource
from headrace.core.errors import ConfigError
from headrace.core.ids import RequestId
from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.core.model_info import KvGroup, ModelInfo
from headrace.core.request import EngineRequest
from headrace.core.sleep import SleepLevel
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.engine.loop import Engine
from headrace.engine.server.config import ProcessConfig
from headrace.engine.server.dispatcher import Updates
from headrace.engine.server.process import leave, run_process
from headrace.wire.leash import Leash


@dataclass(slots=True)
class Speaker:
    """One sequence: what it was asked, and when its tokens left."""

    request: EngineRequest
    commits_s: list[float] = field(default_factory=list)


class PacedEngine:
    """What an engine process needs of an engine. Requests arrive on the wire's thread, `run` is the other one."""

    def __init__(self, outbox: Callable[[Updates], None], given: dict[str, Any]) -> None:
        self.clock = time.monotonic
        self._outbox = outbox
        self._given = given
        self._speakers: dict[RequestId, Speaker] = {}
        self._is_stopped = False
        self._spoken: dict[RequestId, Speaker] = {}
        self.info = ModelInfo(
            architecture="PacedForCausalLM",
            vocab_size=given["vocab_size"],
            max_model_len=4096,
            eos_token_ids=(),
            kv_groups=(KvGroup(layers=(0,), kv_heads=1, head_dim=8, dtype_bytes=4),),
            block_size=16,
            num_blocks=(65_537,),
            dtype="float32",
            weight_bytes=0,
            digests={},
            decided=("a paced text, no model is loaded",),
        )

    def submit(self, request: EngineRequest) -> None:
        self._speakers[request.request_id] = self._spoken[request.request_id] = Speaker(request)

    def cancel(self, request_id: RequestId) -> None:
        self._speakers.pop(request_id, None)

    def finish(self, request_id: RequestId, index: int, keep_tokens: int, reason: FinishReason) -> None:
        self.cancel(request_id)

    def set_adapters(self, sources: Sequence[AdapterSource]) -> None:
        raise ConfigError("lora_modules", "a paced engine has no adapters")

    def change_sleep(self, level: SleepLevel | None) -> Future[None]:
        done: Future[None] = Future()
        done.set_exception(ConfigError("sleep", "this engine does not sleep"))
        return done

    def snapshot(self) -> LoadSnapshot:
        running = len(self._speakers)
        return LoadSnapshot(
            num_running=running,
            num_waiting=0,
            kv_blocks_free=65_536 - running,
            kv_blocks_cached=0,
            kv_blocks_used=running + 1,
            kv_blocks_total=65_537,
            counters=EngineCounters(),
        )

    def stop(self) -> None:
        self._is_stopped = True

    def recent_plans(self) -> bytes:
        return b""

    def run(self) -> None:
        while len(self._speakers) < self._given["num_streams"] and not self._is_stopped:
            time.sleep(0.01)
        num_shares = self._given["frames_per_second"]
        speakers = list(self._spoken.values())
        began = time.monotonic() + 0.5
        turn = 0
        while self._speakers and not self._is_stopped:
            time.sleep(max(0.0, began + turn / num_shares - time.monotonic()))
            self._say(speakers[turn % num_shares :: num_shares])
            turn += 1
        commits = {str(request_id): speaker.commits_s for request_id, speaker in self._spoken.items()}
        Path(self._given["commits"]).write_text(json.dumps(commits))
        while not self._is_stopped:
            time.sleep(0.01)

    def _say(self, speakers: list[Speaker]) -> None:
        now = time.monotonic()
        open_now = [speaker for speaker in speakers if speaker.request.request_id in self._speakers]
        updates = [self._next(speaker) for speaker in open_now]
        for speaker, update in zip(open_now, updates, strict=True):
            speaker.commits_s.append(now)
            if update.finish is not None:
                self._speakers.pop(update.request_id, None)
        if updates:
            self._outbox(list(updates))

    def _next(self, speaker: Speaker) -> SequenceUpdate:
        said, request, position = self._given["said"], speaker.request, len(speaker.commits_s)
        return SequenceUpdate(
            request_id=request.request_id,
            epoch=request.epoch,
            index=0,
            token_ids=(said[position % len(said)],),
            finish=FinishReason.LENGTH if position + 1 == request.params.max_tokens else None,
            num_cached_tokens=0 if position == 0 else None,
            queue_time_s=0.0 if position == 0 else None,
        )


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    config = ProcessConfig(replica="r0", address=given["address"])
    leave(run_process(lambda outbox: cast(Engine, PacedEngine(outbox, given)), config, Leash(None)))


if __name__ == "__main__":
    main()
