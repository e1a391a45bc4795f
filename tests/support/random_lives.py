"""Draws requests at random over the tiny Llama, with all that a client may ask for, and what is done to them while they run.

Each sequence must be answered as by the plain runner, or as the part before it was cut off.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from failpoint_kit import Injected
from runner_kit import CONTEXT, VOCAB

from headrace.core.grammar import Grammar
from headrace.core.ids import PreparationId, RequestId
from headrace.core.model_info import ModelInfo
from headrace.core.plan import Plan, TokenLogprobs
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.speculation import SpeculativeConfig
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.build import assemble
from headrace.engine.config import EngineConfig
from headrace.engine.failpoints import armed_places
from headrace.engine.recovery import Recovery
from headrace.engine.steps import Runner
from headrace.policy.sequence import RUNNING
from headrace.tensor.models.decoder import DecoderModel

Key = tuple[str, int]
LONGEST_PROMPT, LONGEST_OUTPUT, EOS = 50, 24, 2
MOST_OPEN = 12
MAX_TURNS = 40_000


def language(outputs: list[int]) -> range:
    """What every grammar here allows: each output is at most 30 away from the one before."""
    return range(max(0, outputs[-1] - 30), min(VOCAB, outputs[-1] + 31)) if outputs else range(VOCAB)


@dataclass(frozen=True)
class Life:
    """A request and its fate.

    cancel_at  tokens of all its sequences after which the client leaves; None: it stays
    finish_at  tokens of a sequence after which it is ended early with all of them; None: it is not
    """

    request: EngineRequest
    cancel_at: int | None
    finish_at: int | None

    @property
    def keys(self) -> list[Key]:
        return [(str(self.request.request_id), index) for index in self.request.indices]


def draw_lives(count: int, seed: int) -> list[Life]:
    rng = random.Random(seed)
    common = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(6, 30))] for _ in range(4)]
    return [_life(rng, f"r{number}", common) for number in range(count)]


def _life(rng: random.Random, name: str, common: list[list[int]]) -> Life:
    prompt = (rng.choice(common) if rng.random() < 0.5 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 20))]
    has_grammar = rng.random() < 0.2
    request = EngineRequest(
        request_id=RequestId(name),
        prompt_ids=tuple(prompt),
        params=_params(rng, has_grammar=has_grammar),
        grammar=Grammar.json_object() if has_grammar else None,
        prefix_caching=rng.random() < 0.9,
    )
    fate = rng.random()
    return Life(
        request,
        rng.randrange(LONGEST_OUTPUT) if fate < 0.3 else None,
        rng.randint(1, LONGEST_OUTPUT // 2) if 0.3 <= fate < 0.5 else None,
    )


def _params(rng: random.Random, *, has_grammar: bool) -> SamplingParams:
    given: dict[str, Any] = {"temperature": rng.choice((0.0, 0.0, 0.7, 1.0, 1.5)), "seed": rng.getrandbits(62)}
    given["max_tokens"] = rng.randint(1, LONGEST_OUTPUT)
    given["ignore_eos"] = not has_grammar and rng.random() < 0.5
    rare: dict[str, Any] = {
        "n": rng.randint(2, 3),
        "top_p": rng.choice((0.5, 0.9)),
        "top_k": rng.choice((1, 5, 40)),
        "min_p": rng.choice((0.01, 0.1)),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "repetition_penalty": rng.uniform(0.8, 1.4),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-5, 5), EOS: rng.uniform(0, 3)},
        "min_tokens": rng.randint(0, given["max_tokens"]),
        "stop_token_ids": tuple(rng.sample(range(3, VOCAB), 6)),
        "prompt_logprobs": rng.randrange(3),
        "logprobs": rng.randrange(5),
    }
    given.update({name: value for name, value in rare.items() if rng.random() < 0.15})
    return SamplingParams(**given)


@dataclass
class RandomFaults:
    """Raises at the engine's failpoints now and then: at most once in a turn, and never in a step that repeats a failed one's rows.

    rate  chance of a visit to raise
    """

    rng: random.Random
    rate: float
    hits: Counter[str] = field(default_factory=Counter)
    is_on: bool = True

    def spare(self, recovery: Recovery) -> None:
        """A step that fails again when it is repeated alone would rightly end its sequence."""
        recover = recovery.recover

        def spared(plans: list[Plan]) -> None:
            self.is_on = False
            recover(plans)

        recovery.recover = spared  # type: ignore[method-assign]

    def visit(self, name: str) -> None:
        if self.is_on and self.rng.random() < self.rate:
            self.is_on = False
            self.hits[name] += 1
            raise Injected(name)

    @contextmanager
    def armed(self, names: Iterable[str]) -> Iterator[None]:
        for name in names:
            armed_places[name] = lambda name=name: self.visit(name)  # type: ignore[misc]
        try:
            yield
        finally:
            armed_places.clear()


class _Prepared:
    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> dict[str, float]:
        return {}

    def end(self, preparation_id: PreparationId) -> None:
        pass

    def close(self) -> None:
        pass


class LifeEngine:
    def __init__(
        self, decoder: DecoderModel, runner: Runner, *, num_blocks: int, depth: int = 1, speculative: SpeculativeConfig | None = None
    ) -> None:
        config = EngineConfig(
            model="tiny", depth=depth, block_size=4, max_num_seqs=8, max_num_batched_tokens=24, speculative_config=speculative
        )
        info = ModelInfo(
            architecture="LlamaForCausalLM", vocab_size=VOCAB, max_model_len=CONTEXT, eos_token_ids=(EOS,), kv_groups=decoder.kv_groups,
            block_size=4, num_blocks=(num_blocks,), dtype="float32", weight_bytes=1,
        )  # fmt: skip
        self.engine = assemble(config.checked(), runner, info, self._take, preparer=_Prepared())
        self.tokens: dict[Key, list[int]] = defaultdict(list)
        self.logprobs: dict[Key, list[float]] = defaultdict(list)
        self.prompt_logprobs: dict[Key, list[float]] = defaultdict(list)
        self.finish: dict[Key, FinishReason] = {}
        self.errors: dict[Key, str] = {}
        self.counts: Counter[str] = Counter()

    def run(self, lives: Sequence[Life], rng: random.Random, faults: RandomFaults | None = None, *, preempts: bool = True) -> None:
        """To the end of the last one: about MOST_OPEN at a time; now and then a running sequence is preempted."""
        waiting, open_ = list(reversed(lives)), list[Life]()
        if faults is not None:
            faults.spare(self.engine._recovery)
        for _ in range(MAX_TURNS):
            while waiting and len(open_) < MOST_OPEN and rng.random() < 0.7:
                open_.append(waiting.pop())
                self.engine.submit(open_[-1].request)
            open_ = [life for life in open_ if self._look_after(life)]
            if preempts and rng.random() < 0.15:
                self._preempt(rng)
            if faults is not None:
                faults.is_on = True
            if not self.engine.turn() and not waiting and not open_:
                return
        raise AssertionError("the engine did not come to rest")

    def _look_after(self, life: Life) -> bool:
        if all(key in self.finish for key in life.keys):
            return False
        if life.cancel_at is not None and sum(len(self.tokens[key]) for key in life.keys) >= life.cancel_at:
            self._count_flight("cancelled", life)
            self.engine.cancel(life.request.request_id)
            return False
        if life.finish_at is not None:
            for request_id, index in life.keys:
                if (request_id, index) not in self.finish and len(self.tokens[request_id, index]) >= life.finish_at:
                    self._count_flight("ended early", life)
                    self.engine.finish(RequestId(request_id), index, len(self.tokens[request_id, index]))
        return True

    def _count_flight(self, what: str, life: Life) -> None:
        alive = [seq for seq in self.engine.scheduler.sequences.alive() if seq.request.request_id == life.request.request_id]
        self.counts[what] += 1
        self.counts[f"{what} in flight"] += any(seq.num_in_flight for seq in alive)

    def _preempt(self, rng: random.Random) -> None:
        running = [seq for seq in self.engine.scheduler.sequences.alive() if seq.state is RUNNING]
        if running:
            victim = rng.choice(running)
            self.counts["preempted"] += 1
            self.counts["preempted in flight"] += victim.num_in_flight > 0
            self.engine.scheduler.sequences.preempt(victim, self.engine.clock())

    def check_idle(self) -> None:
        self.engine.scheduler.check()
        load = self.engine.snapshot()
        assert (load.num_running, load.num_waiting, load.kv_blocks_used) == (0, 0, len(self.engine.info.kv_groups))

    def differences(self, lives: Sequence[Life], plain: LifeEngine) -> list[str]:
        return [f"{key}: {problem}" for life in lives for key in life.keys if (problem := self._difference(life, key, plain))]

    def _difference(self, life: Life, key: Key, plain: LifeEngine) -> str | None:
        given, whole = self.tokens[key], plain.tokens[key]
        is_cut = self.finish.get(key) is FinishReason.CANCELLED or (life.finish_at is not None and len(whole) >= life.finish_at)
        if given != (whole[: len(given)] if is_cut else whole):
            return f"{given} is not {whole}"
        if not is_cut and self.finish.get(key) != plain.finish[key]:
            return f"{self.finish.get(key)} is not {plain.finish[key]}: {self.errors.get(key)}"
        for mine, its in ((self.logprobs[key], plain.logprobs[key]), (self.prompt_logprobs[key], plain.prompt_logprobs[key])):
            if any(abs(one - other) > 1e-3 for one, other in zip(mine, its, strict=False)) or (not is_cut and len(mine) != len(its)):
                return f"log-probabilities {mine} are not {its}"
        return None

    def _take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            assert isinstance(update, SequenceUpdate), update
            key = (str(update.request_id), update.index)
            assert key not in self.finish, "an update after the end"
            self.tokens[key] += update.token_ids
            self.logprobs[key] += _numbers(update.logprobs)
            self.prompt_logprobs[key] += _numbers(update.prompt_logprobs)
            self.counts["prefix hits"] += bool(update.num_cached_tokens)
            if update.error is not None:
                self.errors[key] = update.error
            if update.finish is not None:
                self.finish[key] = update.finish


def _numbers(entries: Sequence[TokenLogprobs]) -> list[float]:
    return [value for entry in entries for value in (entry.logprob, entry.rank, *entry.top_logprobs, *entry.top_ids)]
