"""Runs one replica of the simulator over the fake runner, which verifies paged memory: arrivals are given, times of tokens come out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import Rejected
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, FakeRunner, fake_info
from headrace.lab.simulate.build import SimulatedReplica, Update


def asked(name: str, *, prompt_tokens: int, output_tokens: int, **given: Any) -> EngineRequest:
    """A request whose prompt no other one begins with."""
    own = [ord(letter) for letter in name.rjust(12)]
    further = (token % 4000 for token in range(prompt_tokens))
    prompt = [*own, *further][:prompt_tokens] if prompt_tokens >= len(own) else own[-prompt_tokens:]
    params = SamplingParams(seed=0, max_tokens=output_tokens, ignore_eos=True)
    return EngineRequest(request_id=RequestId(name), prompt_ids=tuple(prompt), params=params, **given)


class VirtualEngine:
    """One engine.

    arrived     by request: when it was to arrive
    token_times by request: when each of its tokens came
    token_ids   by request
    """

    def __init__(self, config: EngineConfig, options: FakeOptions) -> None:
        self.options = options
        self._replica = SimulatedReplica(
            config.checked(), fake_info(options), lambda clock, wait: FakeRunner(options, clock=clock, wait=wait)
        )
        self.engine = self._replica.engine
        self.arrived: dict[str, float] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.token_times: defaultdict[str, list[float]] = defaultdict(list)
        self.token_ids: defaultdict[str, list[int]] = defaultdict(list)
        self.ended: set[str] = set()
        self.refused: dict[str, Exception] = {}

    @property
    def now(self) -> float:
        return self._replica.now

    def rest(self, seconds: float) -> None:
        self._replica.now += seconds

    def _take(self, updates: list[Update]) -> None:
        for update in updates:
            if isinstance(update, Rejected):
                self.refused[update.request_id] = update.error
                continue
            self.token_times[update.request_id] += [self.now] * len(update.token_ids)
            self.token_ids[update.request_id] += update.token_ids
            if update.finish is not None:
                self.ended.add(update.request_id)

    def run(self, arrivals: Iterable[tuple[float, EngineRequest]], *, until: float | None = None) -> None:
        """Turn until all requests have ended, or until a time. A request that arrives during a step is submitted after it."""
        waiting = sorted(arrivals, key=lambda pair: (pair[0], pair[1].request_id))
        for at, request in waiting:
            self.arrived[request.request_id], self.requests[request.request_id] = at, request
        position = 0
        while until is None or self.now < until:
            while position < len(waiting) and waiting[position][0] <= self.now:
                self.submit(waiting[position][1])
                position += 1
            updates = self._replica.turn(self.now)
            if updates is not None:
                self._take(updates)
            elif position < len(waiting):
                self._replica.now = waiting[position][0]
            else:
                break
        self.engine.scheduler.check()

    def submit(self, request: EngineRequest) -> None:
        self._replica.submit(request, self.now)

    def ttft_s(self, prefix: str) -> list[float]:
        return [self.token_times[name][0] - at for name, at in self.arrived.items() if name.startswith(prefix)]

    def tpot_s(self, prefix: str) -> list[float]:
        times = [self.token_times[name] for name in self.arrived if name.startswith(prefix)]
        return [(each[-1] - each[0]) / (len(each) - 1) for each in times]

    def num_tokens(self, tenant: str) -> int:
        return sum(len(ids) for name, ids in self.token_ids.items() if self.requests[name].tenant == tenant)


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def jain(shares: list[float]) -> float:
    """Jain's index of fairness: 1 where all are equal, 1/n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
