"""Builds small things for policy and loop tests: groups, schedulers, requests, a driven engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from kv_oracle import OracleRunner

from headrace.core.errors import HeadraceError
from headrace.core.ids import PreparationId, RequestId
from headrace.core.model_info import KvGroup, ModelInfo
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.loop import Engine
from headrace.engine.sleeping import EngineMemory
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.scheduler import Scheduler

FULL = KvGroup(layers=(0,), kv_heads=1, head_dim=8, dtype_bytes=4)
WINDOW = KvGroup(layers=(1,), kv_heads=1, head_dim=8, dtype_bytes=4, window=6)
VOCAB = 97


def request(name: str, prompt: list[int], **changes: Any) -> EngineRequest:
    """A greedy request; SamplingParams fields and EngineRequest fields may both be given."""
    ours = {f: changes.pop(f) for f in list(changes) if f in EngineRequest.__dataclass_fields__ and f != "params"}
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 8, "ignore_eos": True, **changes})
    return EngineRequest(request_id=RequestId(name), prompt_ids=tuple(prompt), params=params, **ours)


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class NotedPreparer:
    """Prerequisites by request; notes what was begun and what has ended.

    needs       of each request, by name, each with the seconds it may take
    preparation_ids  the last one of each request
    """

    def __init__(self) -> None:
        self.needs: dict[str, Mapping[str, float]] = {}
        self.preparation_ids: dict[str, PreparationId] = {}
        self.begun: list[PreparationId] = []
        self.ended: Counter[PreparationId] = Counter()

    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> Mapping[str, float]:
        self.begun.append(preparation_id)
        self.preparation_ids[request.request_id] = preparation_id
        return self.needs.get(request.request_id, {})

    def end(self, preparation_id: PreparationId) -> None:
        self.ended[preparation_id] += 1

    def close(self) -> None:
        """The loop has ended."""

    def check_idle(self) -> None:
        assert self.ended == Counter(self.begun)


class DrivenEngine:
    """A real scheduler and loop over the oracle runner, turned by hand."""

    def __init__(
        self,
        *,
        groups: tuple[KvGroup, ...] = (FULL,),
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 64,
        depth: int = 1,
        caching: bool = True,
        eos: tuple[int, ...] = (),
        prerequisite_timeout_s: float = 60.0,
        static_batching: bool = False,
        memory: EngineMemory | None = None,
        **config: Any,
    ) -> None:
        self.clock = ManualClock()
        self.preparer = NotedPreparer()
        self.prerequisite_timeout_s = prerequisite_timeout_s
        counts = tuple(num_blocks for _ in groups)
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": max_model_len, "depth": depth, **config}
        settings["eos_token_ids"] = eos
        self.kv = KvManager(groups, counts, block_size, caching=caching)
        self.scheduler = Scheduler(SchedulerConfig(**settings), self.kv)
        if static_batching:
            self.scheduler.batch_statically()
        self.runner = OracleRunner(groups, counts, block_size, vocab_size=VOCAB, lazy=depth > 1)
        info = ModelInfo(
            architecture="oracle",
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            eos_token_ids=eos,
            kv_groups=groups,
            block_size=block_size,
            num_blocks=counts,
            dtype="float32",
            weight_bytes=0,
        )
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finish: dict[tuple[str, int], FinishReason] = {}
        self.errors: dict[str, Exception] = {}
        self.updates: list[SequenceUpdate] = []
        self.engine = Engine(
            self.scheduler, self.runner, info=info, outbox=self.take, preparer=self.preparer, clock=self.clock, memory=memory
        )

    def take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            if isinstance(update, Rejected):
                self.errors[update.request_id] = update.error
                continue
            self.updates.append(update)
            key = (str(update.request_id), update.index)
            assert key not in self.finish, "an update after the end"
            self.tokens[key] += update.token_ids
            if update.finish is not None:
                self.finish[key] = update.finish
                if update.error:
                    self.errors[update.request_id] = HeadraceError(update.error)

    def submit(self, *requests: EngineRequest, needs: frozenset[str] = frozenset()) -> None:
        for item in requests:
            self.preparer.needs[item.request_id] = dict.fromkeys(needs, self.prerequisite_timeout_s)
            self.engine.submit(item)

    def satisfied(self, name: str, what: str) -> None:
        if (preparation_id := self.preparer.preparation_ids.get(name)) is not None:
            self.engine.satisfied(preparation_id, what)

    def failed(self, name: str, what: str, error: Exception) -> None:
        if (preparation_id := self.preparer.preparation_ids.get(name)) is not None:
            self.engine.failed(preparation_id, what, error)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.turn()

    def run(self, max_turns: int = 5_000) -> DrivenEngine:
        """Turn until nothing is left, then check that nothing leaked."""
        for _ in range(max_turns):
            if not self.engine.turn():
                self.check_idle()
                return self
        raise AssertionError("the engine did not come to rest")

    def check_idle(self) -> None:
        self.scheduler.check()
        snapshot = self.engine.snapshot()
        assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)
        assert snapshot.kv_blocks_used == len(self.kv.pools), "only the pad blocks are used when idle"
        self.preparer.check_idle()
