"""Checks that each of many adapters over few places is answered with its own weights, through `headrace serve`, while the engine is killed
and an adapter is loaded again under its name with other weights; and measures base-model streams beside reads of adapters.

    python -m bench.storms.adapters [--requests 3000] [--clients 48] [--adapters 200] [--seconds 20] [--seed 0]
        -> bench/results/storms/adapters.json

A deterministic server of the bundled model in float32; its adapters have random weights. `--clients` send one streamed request after
another, each for an adapter at random, a tenth for the base model and a tenth for the adapter that is replaced. After a third of the
requests that adapter's file is replaced, while a stream runs with the old one, and `headrace adapters load` loads it again. After two
thirds the engine is killed (SIGKILL). Each whole answer is compared with the one that `LLM` gives for its adapter's weights, one request
at a time. Ends with status 1 where one differs, or where the pool was larger than `max_cpu_loras` adapters.

Before that, for `--seconds` each and twice in turns: streams of the base model beside clients of the base model, of adapters that are all
in memory, and of all adapters.

different     whole answers that are not those of the adapter's weights; of the replaced one either weights while it was loaded
distinct      different answers that were expected: so many weights and questions could have been confused and seen
failed        requests without a whole answer, by what their client saw
open_at_kill  requests that ran when the engine was killed; asked_during_load: of the replaced adapter, which either weights may answer
pool          highest_bytes of the adapters on the host, seen at /metrics; max_bytes: `max_cpu_loras` times what one took
reads         of adapters, over both lives of the engine, with those that failed and the adapters that left the pool
itl_ms        gaps between pieces of the base model's streams
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from bench.storms.common import RESULTS, Served, served
from bench.storms.failover import MODEL, Answer, quantiles, streamed
from headrace import LLM, LoRARequest, SamplingParams
from headrace.bundled import bundled_adapter, bundled_path
from headrace.lab.environment import environment
from headrace.lab.report import write_json

QUESTIONS = ("What is the capital of France?", "Count to ten.")
MAX_TOKENS, LONG_TOKENS = 16, 200
MAX_LORAS, MAX_CPU_LORAS, RANK = 32, 48, 8
REPLACED, NEW = "adapter-0", "adapter-0, new"
NUM_STREAMS, NUM_BESIDE = 4, 16
WATCH_S = 0.5
RETRY_S = 1.0
"""Seconds that a client waits after an answer that failed, as the Retry-After of a model without an engine asks for."""
DETERMINISTIC: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "deterministic": True, "dtype": "float32"}

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Asked:
    """model: a name that clients ask for"""

    model: str
    question: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Replacement:
    """Moments: before the file was replaced, and after the command ended."""

    began_at: float
    ended_at: float


def weights_of(asked: Asked, answer: Answer, replacement: Replacement) -> tuple[str, ...]:
    """Names of the weights that the answer may be of."""
    if asked.model != REPLACED:
        return (asked.model,)
    old = (REPLACED,) if answer.began_at < replacement.ended_at else ()
    return (*old, NEW) if answer.ended_at > replacement.began_at else old


def over_lives(samples: Iterable[float]) -> float:
    """What a counter counted that begins at 0 again with each new process."""
    total = last = 0.0
    for value in samples:
        if value < last:
            total += last
        last = value
    return total + last


def kind_of(error: str) -> str:
    """Status and message, without the names of adapters."""
    return re.sub(r"adapter-\d+", "adapter-N", re.sub(r'\{"error":\{"message":"([^"]*)".*', r"\1", error))


def save_random_adapter(folder: Path, seed: int) -> None:
    """Weights of a bundled adapter's shapes; its answers differ from those of the base model."""
    shapes = bundled_adapter("pirate")
    assert shapes is not None
    drawn = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    shutil.copy(shapes / "adapter_config.json", folder)
    weights = load_file(shapes / WEIGHTS)
    save_file({name: torch.randn(each.shape, generator=drawn) * 0.1 for name, each in weights.items()}, folder / WEIGHTS)


@dataclass(slots=True)
class AdapterSite:
    """A server, its adapters' folders below `lora_root`, and copies of the weights that stay, by name."""

    folder: Path
    num_adapters: int
    server: Served | None = None
    kept: dict[str, Path] = field(default_factory=dict)

    @property
    def lora_root(self) -> Path:
        return self.folder / "adapters"

    def save(self) -> None:
        names = [f"adapter-{number}" for number in range(self.num_adapters)]
        for seed, name in enumerate([*names, NEW]):
            self.kept[name] = self.folder / "kept" / name
            save_random_adapter(self.kept[name], seed)
        for name in names:
            shutil.copytree(self.kept[name], self.lora_root / name)

    def config(self) -> Path:
        """The replaced adapter is not in it: only one that was loaded at run time can be loaded again."""
        (self.folder / "run").mkdir()
        engine = {**DETERMINISTIC, "model": str(bundled_path(MODEL)), "max_loras": MAX_LORAS, "max_cpu_loras": MAX_CPU_LORAS}
        adapters = {name: str(self.lora_root / name) for name in self.kept if name not in (REPLACED, NEW)}
        content = {
            "models": [{"name": MODEL, "engine": {**engine, "num_kv_blocks": 2000}, "adapters": adapters}],
            "lora_root": str(self.lora_root),
            "run_dir": str(self.folder / "run"),
        }
        path = self.folder / "headrace.yaml"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    async def load(self) -> None:
        """`headrace adapters load` of the adapter that is replaced. Raises RuntimeError."""
        (run_dir,) = (self.folder / "run").iterdir()
        words = ["adapters", "load", REPLACED, REPLACED, "--run-dir", str(run_dir)]
        command = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "headrace", *words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await command.communicate()
        if command.returncode:
            raise RuntimeError(f"headrace adapters load ended with {command.returncode}: {said.decode()}")

    async def replace(self) -> Replacement:
        began = time.monotonic()
        partial = self.lora_root / "partial"
        shutil.copy(self.kept[NEW] / WEIGHTS, partial)
        partial.replace(self.lora_root / REPLACED / WEIGHTS)
        await self.load()
        return Replacement(began, time.monotonic())


@contextmanager
def running_site(num_adapters: int) -> Iterator[AdapterSite]:
    with TemporaryDirectory(prefix="hr-") as name:
        site = AdapterSite(Path(name), num_adapters)
        site.save()
        with served("--config", str(site.config())) as site.server:
            yield site


class AdapterClients:
    """done: every request and its answer"""

    def __init__(self, site: AdapterSite, session: aiohttp.ClientSession, seed: int) -> None:
        assert site.server is not None
        self._site, self._session, self._server = site, session, site.server
        self.draw = random.Random(seed)
        self.done: list[tuple[Asked, Answer]] = []
        self.metrics: list[dict[str, float]] = []

    async def ask(self, model: str, max_tokens: int = MAX_TOKENS) -> Answer:
        asked = Asked(model, self.draw.choice(QUESTIONS), max_tokens)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": asked.question}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        answer = await streamed(self._session, self._server.port, body)
        self.done.append((asked, answer))
        return answer

    async def watch(self) -> None:
        """Reads the engine's figures of adapters until it is cancelled."""
        while True:
            async with self._session.get(f"http://127.0.0.1:{self._server.port}/metrics") as response:
                page = await response.text()
            samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
            found = {sample.name: sample.value for sample in samples if sample.name.startswith("headrace_adapter_")}
            if "headrace_adapter_pool_bytes" in found:  # else the engine is gone
                self.metrics.append(found)
            await asyncio.sleep(WATCH_S)

    async def first_bytes(self) -> float:
        """Of one adapter in the pool, which was empty."""
        await self.ask(REPLACED)
        await self._until(lambda: bool(self.metrics) and self.metrics[-1]["headrace_adapter_reads_total"] == 1)
        return self.metrics[-1]["headrace_adapter_pool_bytes"]

    def counted(self, name: str) -> float:
        return over_lives(found[f"headrace_adapter_{name}_total"] for found in self.metrics)

    def any_model(self) -> str:
        share = self.draw.random()
        return MODEL if share < 0.1 else REPLACED if share < 0.2 else f"adapter-{self.draw.randrange(1, self._site.num_adapters)}"

    async def storm(self, num_requests: int, num_clients: int) -> tuple[Replacement, float]:
        """All requests are sent and answered. Returns when the adapter was replaced, and when the engine was killed."""
        num_before, todo = len(self.done), iter(range(num_requests))

        async def client() -> None:
            for _ in todo:
                answer = await self.ask(self.any_model())
                if answer.error:
                    await asyncio.sleep(RETRY_S)

        async def faults() -> tuple[Replacement, float]:
            await self._until(lambda: len(self.done) - num_before >= num_requests // 3)
            in_use = asyncio.create_task(self.ask(REPLACED, LONG_TOKENS))
            await asyncio.sleep(0)
            replacement = await self._site.replace()
            await in_use
            await self._until(lambda: len(self.done) - num_before >= 2 * num_requests // 3)
            (engine,) = self._server.engine_pids
            os.kill(engine, signal.SIGKILL)
            return replacement, time.monotonic()

        task = asyncio.create_task(faults())
        await asyncio.gather(task, *(client() for _ in range(num_clients)))
        return task.result()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.05)

    async def beside(self, models: Sequence[str], seconds: float) -> dict[str, Any]:
        """Streams of the base model beside clients of these models."""
        await asyncio.gather(*(self.ask(model) for model in models[:NUM_BESIDE]))
        await asyncio.sleep(2 * WATCH_S)
        end, num_reads = time.monotonic() + seconds, self.counted("reads")

        async def client() -> None:
            while time.monotonic() < end:
                await self.ask(self.draw.choice(models))

        async def stream() -> list[Answer]:
            answers = []
            while time.monotonic() < end:
                answers.append(await self.ask(MODEL, LONG_TOKENS))
            return answers

        clients = [asyncio.create_task(client()) for _ in range(NUM_BESIDE)]
        streams = await asyncio.gather(*(stream() for _ in range(NUM_STREAMS)))
        await asyncio.gather(*clients)
        await asyncio.sleep(2 * WATCH_S)
        gaps_s = [gap for answers in streams for answer in answers for gap in answer.gaps_s]
        return {"gaps_s": gaps_s, "reads": self.counted("reads") - num_reads}


async def measured(clients: AdapterClients, num_adapters: int, seconds: float) -> dict[str, Any]:
    """What base-model streams wait between pieces, beside each sort of clients."""
    every = [f"adapter-{number}" for number in range(1, num_adapters)]
    beside = {"the base model": [MODEL], "adapters in memory": every[:NUM_BESIDE], "all adapters": every}
    gaps_s: dict[str, list[float]] = {name: [] for name in beside}
    reads: Counter[str] = Counter()
    for _ in range(2):
        for name, models in beside.items():
            found = await clients.beside(models, seconds)
            gaps_s[name] += found["gaps_s"]
            reads[name] += round(found["reads"])
    return {
        name: {"itl_ms": {at: round(1e3 * value, 1) for at, value in quantiles(found).items()}, "gaps": len(found), "reads": reads[name]}
        for name, found in gaps_s.items()
    }


def expected_texts(keys: Iterable[tuple[str, str, int]], kept: dict[str, Path]) -> dict[tuple[str, str, int], str]:
    """(name of weights, question, max_tokens) -> answer, one at a time."""
    llm = LLM(MODEL, **DETERMINISTIC, max_loras=1, max_num_seqs=1, enable_prefix_caching=False, num_gpu_blocks_override=200)
    ids = {name: number for number, name in enumerate(kept, 1)}
    found = {}
    with llm:
        for weights, question, max_tokens in sorted(set(keys)):
            adapter = LoRARequest(weights.replace(", ", "-"), ids[weights], str(kept[weights])) if weights in kept else None
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            (output,) = llm.chat([{"role": "user", "content": question}], params, lora_request=adapter, use_tqdm=False)
            found[weights, question, max_tokens] = output.outputs[0].text
    return found


def compared(clients: AdapterClients, replacement: Replacement, kept: dict[str, Path]) -> dict[str, Any]:
    whole = [(asked, answer, weights_of(asked, answer, replacement)) for asked, answer in clients.done if not answer.error]
    keys = [(each, asked.question, asked.max_tokens) for asked, _, weights in whole for each in weights]
    expected = expected_texts(keys, kept)
    different: Counter[str] = Counter()
    for asked, answer, weights in whole:
        if answer.parts["0"]["text"] not in {expected[each, asked.question, asked.max_tokens] for each in weights}:
            different[asked.model] += 1
    return {
        "requests": len(clients.done),
        "whole": len(whole),
        "different": dict(different),
        "expected": len(expected),
        "distinct": len(set(expected.values())),
        "failed": dict(Counter(kind_of(answer.error) for _, answer in clients.done if answer.error)),
    }


async def run(site: AdapterSite, given: argparse.Namespace) -> tuple[AdapterClients, Replacement, dict[str, Any]]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = AdapterClients(site, session, given.seed)
        await site.load()
        watching = asyncio.create_task(clients.watch())
        max_bytes = MAX_CPU_LORAS * round(await clients.first_bytes())
        steps = await measured(clients, site.num_adapters, given.seconds)
        began = time.monotonic()
        replacement, killed_at = await clients.storm(given.requests, given.clients)
        storm = {
            "seconds": round(time.monotonic() - began, 1),
            "load_s": round(replacement.ended_at - replacement.began_at, 2),
            "asked_during_load": sum(
                asked.model == REPLACED and len(weights_of(asked, answer, replacement)) == 2 for asked, answer in clients.done
            ),
            "open_at_kill": sum(answer.began_at < killed_at < answer.ended_at for _, answer in clients.done),
        }
        await asyncio.sleep(2 * WATCH_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    highest = round(max(found["headrace_adapter_pool_highest_bytes"] for found in clients.metrics))
    reads = {name: round(clients.counted(name), 3) for name in ("reads", "read_seconds", "reads_failed", "evictions")}
    pool = {"highest_bytes": highest, "max_bytes": max_bytes}
    return clients, replacement, {"storm": storm, "reads": reads, "pool": pool, "base_streams_beside": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with running_site(given.adapters) as site:
        clients, replacement, found = asyncio.run(run(site, given))
        found = {**compared(clients, replacement, site.kept), **found}
    print(json.dumps(found, indent=1))
    write_json(RESULTS / "adapters.json", {"environment": asdict(environment()), "arguments": vars(given), **found})
    if found["different"]:
        raise SystemExit(f"answers that are not those of their adapter's weights: {found['different']}")
    if found["pool"]["highest_bytes"] > found["pool"]["max_bytes"]:
        raise SystemExit(f"the pool was larger than {MAX_CPU_LORAS} adapters: {found['pool']}")


if __name__ == "__main__":
    main()
