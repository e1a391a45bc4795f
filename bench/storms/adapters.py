"""Checks that each of many adapters over few places is answered with its own weights, while clients leave, the engine is killed, and an
adapter is loaded again under its name with other weights.

    python -m bench.storms.adapters [--adapters 200] [--places 32] [--requests 3000]
        -> bench/results/storms/adapters.json

One deterministic engine of the bundled model in this process; its adapters have random weights. At a third of the requests the first
adapter, which is in use, is loaded again. At half of them the engine is gone and another goes on with what was sent, as failover does; of
the first adapter's old weights nothing is left, so requests for them are refused. Each answer, and each part of one, is compared with the
answer of an engine that computes one request at a time.

different    answers, and parts of answers, that are not those of the adapter's weights
refused      requests for weights that were replaced before they were read again
peak_bytes   of the adapters on the host
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.storms.common import RESULTS
from headrace.bundled import DEFAULT_MODEL, bundled_adapter, bundled_path
from headrace.core.adapters import AdapterSource
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.build import build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.lab.environment import environment
from headrace.lab.report import write_json
from headrace.text.folder import load_text

QUESTIONS = ("What is the capital of France?", "What is the capital of France, and why?", "Count to ten.", "What is a mill?")
MAX_TOKENS = 12
MAX_TURNS = 10**6
CONFIG = EngineConfig(
    model=str(bundled_path(DEFAULT_MODEL)),
    deterministic=True,
    dtype="float32",
    block_size=4,
    num_kv_blocks=600,
    enable_lora=True,
    max_lora_rank=8,
)

Build = Callable[[EngineConfig, Outbox], Engine]
Save = Callable[[Path, int], Path]
"""Writes the adapter of a seed into a folder, and returns it."""


def save_random_adapter(folder: Path, seed: int) -> Path:
    """Of the shapes of a bundled one; its answers differ from those of the base model."""
    shapes = bundled_adapter("pirate")
    assert shapes is not None
    drawn = torch.Generator().manual_seed(seed)
    weights = load_file(shapes / "adapter_model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shapes / "adapter_config.json", folder)
    save_file(
        {name: torch.randn(each.shape, generator=drawn) * 0.05 for name, each in weights.items()}, folder / "adapter_model.safetensors"
    )
    return folder


class TurnedEngine:
    """An engine turned by hand, and the tokens of each of its requests so far."""

    def __init__(self, build: Build, config: EngineConfig) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.open: set[str] = set()
        self.refused: dict[str, Exception] = {}
        self.engine = build(config, self._take)

    def _take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            name = str(update.request_id)
            if isinstance(update, Rejected):
                self.refused[name] = update.error
                self.open.discard(name)
                continue
            assert update.error is None, update.error
            self.token_ids[name] += update.token_ids
            if update.finish is not None:
                self.open.discard(name)

    def submit(self, request: EngineRequest) -> None:
        self.token_ids[str(request.request_id)] = list(request.output_ids)
        self.open.add(str(request.request_id))
        self.engine.submit(request)

    def turn(self) -> None:
        if not self.engine.turn():
            self.engine.idle()  # an adapter is read on another thread

    def check(self) -> int:
        """Every owner's books are right. Returns the bytes of the adapters on the host."""
        adapters = self.engine._adapters
        assert adapters is not None
        adapters.check()
        return adapters.reads_done.pool_bytes

    def check_idle(self) -> None:
        self.engine.scheduler.check()
        load = self.engine.snapshot()
        assert (load.num_running, load.num_waiting, load.running_adapters, load.waiting_adapters) == (0, 0, (), ())
        assert load.kv_blocks_used == len(self.engine.info.kv_groups), "one pad block of each group is always in use"

    def close(self) -> None:
        self.engine.stop()
        self.engine.run()


@dataclass
class Churn:
    """requests  all that were sent, by name. ended_early: those that their client left"""

    folder: Path
    num_adapters: int
    num_places: int
    num_requests: int
    seed: int = 0
    build: Build = build_engine
    save: Save = save_random_adapter
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    ended_early: set[str] = field(default_factory=set)
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)
    num_reloads: int = 0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        names = [f"adapter-{number}" for number in range(self.num_adapters)]
        self._sources = [AdapterSource(name=name, path=str(self._save(name, number))) for number, name in enumerate(names)]
        tokenizer = load_text(Path(str(bundled_path(DEFAULT_MODEL)))).tokenizer
        self._prompts = [tuple(tokenizer.encode(question, add_special_tokens=True)) for question in QUESTIONS]
        self._engine = self._start()

    def _save(self, name: str, seed: int) -> Path:
        """The folder that an engine reads, and a copy of it that stays."""
        kept = self.save(self.folder / "kept" / f"{name}-{seed}", seed)
        return Path(shutil.copytree(kept, self.folder / name, dirs_exist_ok=True))

    def _start(self) -> TurnedEngine:
        config = replace(CONFIG, lora_modules=tuple(self._sources), max_loras=self.num_places)
        return TurnedEngine(self.build, replace(config, max_num_seqs=min(64, 2 * self.num_places), max_num_batched_tokens=64))

    def run(self) -> None:
        """Raises AssertionError where an engine's books are wrong."""
        for _ in range(MAX_TURNS):
            if len(self.requests) >= self.num_requests and not self._engine.open:
                break
            self._submit()
            if len(self.requests) >= self.num_requests // 3 and self.num_reloads == 0:
                self._reload()
            if len(self.requests) >= self.num_requests // 2 and self.num_reloads == 1:
                self._reload()
                self._kill()
            if self._engine.open and self._draw.random() < 0.05:
                self._leave(self._draw.choice(sorted(self._engine.open)))
            self._engine.turn()
            self.peak_bytes = max(self.peak_bytes, self._engine.check())
        else:
            raise AssertionError(f"{len(self._engine.open)} requests did not end")
        self._take_over(self._engine)
        self._engine.check_idle()
        self._engine.close()

    def _submit(self) -> None:
        while len(self.requests) < self.num_requests and len(self._engine.open) < 3 * self.num_places and self._draw.random() < 0.7:
            self._ask(None if self._draw.random() < 0.1 else self._draw.choice(self._sources).name)

    def _ask(self, adapter: str | None) -> str:
        name = f"r{len(self.requests)}"
        request = EngineRequest(
            request_id=RequestId(name),
            prompt_ids=self._draw.choice(self._prompts),
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_TOKENS, ignore_eos=True),
            tenant=self._draw.choice("abc"),
            adapter=adapter,
            adapter_digest="" if adapter is None else self._engine.engine.info.adapters[adapter],
        )
        self.requests[name] = request
        self._engine.submit(request)
        return name

    def _leave(self, name: str) -> None:
        self._engine.engine.cancel(RequestId(name))
        self.ended_early.add(name)

    def _reload(self) -> None:
        """The first adapter under its name with other weights, while a request runs with the old ones."""
        name = self._ask("adapter-0")
        while name in self._engine.open and not self._engine.token_ids[name]:
            self._engine.turn()
        self.num_reloads += 1
        self._save("adapter-0", self.num_adapters + self.num_reloads)
        before = self._engine.engine.info.adapters["adapter-0"]
        self._engine.engine.set_adapters(self._sources)
        assert self._engine.engine.info.adapters["adapter-0"] != before
        self._ask("adapter-0")

    def _kill(self) -> None:
        dead, self._engine = self._engine, self._start()
        self._take_over(dead)
        dead.close()
        for name in sorted(dead.open - self.ended_early):
            self._engine.submit(self.requests[name].resumed(0, dead.token_ids[name], ""))

    def _take_over(self, engine: TurnedEngine) -> None:
        self.token_ids |= engine.token_ids
        self.refused |= engine.refused

    def expected(self) -> dict[tuple[str, tuple[int, ...]], list[int]]:
        """(digest, prompt) -> the answer of an engine that computes one request at a time, for all that were asked."""
        kept = [AdapterSource(name=path.name, path=str(path)) for path in sorted((self.folder / "kept").iterdir())]
        config = replace(CONFIG, lora_modules=tuple(kept), max_loras=1, max_num_seqs=1, enable_prefix_caching=False)
        alone = TurnedEngine(self.build, config)
        names = {digest: name for name, digest in alone.engine.info.adapters.items()} | {"": None}
        found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for key in sorted({(request.adapter_digest, request.prompt_ids) for request in self.requests.values()}):
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_TOKENS, ignore_eos=True)
            name = f"alone-{len(found)}"
            request = EngineRequest(
                request_id=RequestId(name), prompt_ids=key[1], params=params, adapter=names[key[0]], adapter_digest=key[0]
            )
            alone.submit(request)
            while alone.open:
                alone.turn()
            found[key] = alone.token_ids[name]
        alone.close()
        return found

    def different(self) -> list[str]:
        """Names of requests whose answer, or part of one, is another than that of their adapter's weights."""
        expected = self.expected()
        wrong = []
        for name, request in self.requests.items():
            whole, got = expected[request.adapter_digest, request.prompt_ids], self.token_ids[name]
            is_whole = name not in self.ended_early and name not in self.refused
            if got != (whole if is_whole else whole[: len(got)]):
                wrong.append(name)
        return wrong


def storm(*, num_adapters: int, num_places: int, num_requests: int, seed: int = 0) -> dict[str, Any]:
    with TemporaryDirectory(prefix="headrace-adapters-") as folder:
        churn = Churn(Path(folder), num_adapters, num_places, num_requests, seed)
        churn.run()
        different = churn.different()
    return {
        "adapters": num_adapters, "places": num_places, "requests": num_requests, "seed": seed,
        "different": different, "left": len(churn.ended_early), "reloads": churn.num_reloads,
        "refused": {name: str(error) for name, error in churn.refused.items()}, "peak_bytes": churn.peak_bytes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--places", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = storm(num_adapters=given.adapters, num_places=given.places, num_requests=given.requests, seed=given.seed)
    write_json(RESULTS / "adapters.json", {"environment": environment(), **found})
    print(json.dumps(found, indent=2))
    if found["different"]:
        raise SystemExit(f"{len(found['different'])} answers are not those of their adapter's weights")


if __name__ == "__main__":
    main()
