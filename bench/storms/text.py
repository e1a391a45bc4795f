"""Sends storms of heavy prompts to `headrace serve`, and measures the gateway's memory, the prompts' time, and the delay of other
streams.

    python -m bench.storms.text [--source TREE] [--only mixed ...]     writes bench/results/storms/text-COMMIT.json

A server of the bundled model is started from the sources in TREE (default: this one), so that two versions are measured alike. Neighbours
are streams that run all the while; their worst gap is what a storm does to others. Times depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "storms"
CAPTION = "Times depend on what else the machine did (load_average before the storms); counts and memory do not."
MODEL = "headrace-tiny"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
STEERED = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}"
BOMB = "{{ 'A' * 10**9 }}"
NUM_NEIGHBOURS = 4
REST_S = 10.0
"""From the last answer to the look at what remains."""


@dataclass
class Server:
    """One running deployment, and the memory of its processes (MiB): the gateway alone, and with the processes it started."""

    process: subprocess.Popen[str]
    url: str = ""
    gateway_mib: float = 0.0
    family_mib: float = 0.0
    peak_gateway_mib: float = 0.0
    peak_family_mib: float = 0.0
    said: str = ""

    def look(self) -> None:
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                if "gateway" in child.cmdline():
                    own = child.memory_info().rss
                    family = own + sum(one.memory_full_info().uss for one in child.children(recursive=True))
                    self.gateway_mib, self.family_mib = own / 2**20, family / 2**20
                    self.peak_gateway_mib = max(self.peak_gateway_mib, self.gateway_mib)
                    self.peak_family_mib = max(self.peak_family_mib, self.family_mib)


@contextmanager
def server(source: Path, folder: Path) -> Iterator[Server]:
    """`headrace serve` from a source tree. Its `url` is empty when it refused to start; `said` has its words then."""
    command = [sys.executable, "-m", "headrace", "serve", str(folder), "--served-model-name", MODEL, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "HEADRACE_STATE": str(folder / "state")}
    with tempfile.NamedTemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=source, env=environment, stdout=out, stderr=errors, text=True)
        made = Server(process)
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None and not made.url:
                made.look()
                said = Path(errors.name).read_text() + Path(out.name).read_text()  # sources differ in where they say it
                if found := re.search(r"Serving .* at (http://[^\s\"]+)", said):
                    made.url = found[1]
                time.sleep(0.02)
            yield made
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()
            errors.seek(0)
            made.said = errors.read()[-600:]


@dataclass
class Neighbours:
    """Streams that run during a storm. lost: streams that ended before their last token."""

    worst_gap_s: float = 0.0
    num_whole: int = 0
    num_lost: int = 0
    is_over: bool = False

    async def run(self, session: aiohttp.ClientSession) -> None:
        while not self.is_over:
            body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
            last, is_done = None, False  # a gap is between two chunks: how long the first one takes is the queue's affair
            try:
                async with session.post(COMPLETIONS, json=body) as answer:
                    async for line in answer.content:
                        if line.startswith(b"data: "):
                            now = time.monotonic()
                            self.worst_gap_s = max(self.worst_gap_s, now - (last or now))
                            last, is_done = now, b"[DONE]" in line
            except (aiohttp.ClientError, TimeoutError):
                pass
            self.num_whole += is_done
            self.num_lost += not is_done


@asynccontextmanager
async def neighbours(session: aiohttp.ClientSession) -> AsyncIterator[Neighbours]:
    made = Neighbours()
    tasks = [asyncio.create_task(made.run(session)) for _ in range(NUM_NEIGHBOURS)]
    await asyncio.sleep(1.0)
    made.worst_gap_s = 0.0
    try:
        yield made
    finally:
        made.is_over = True
        await asyncio.gather(*tasks)


@dataclass
class Outcomes:
    """What became of the storm's own requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)

    async def ask(self, session: aiohttp.ClientSession, path: str, body: bytes) -> None:
        began = time.monotonic()
        try:
            async with session.post(path, data=body, headers={"content-type": "application/json"}) as answer:
                await answer.read()
                status = str(answer.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            status = type(error).__name__
        self.statuses[status] += 1
        (self.refused_s if status.startswith("4") else self.answered_s).append(time.monotonic() - began)

    def figures(self) -> dict[str, Any]:
        return {"statuses": dict(sorted(self.statuses.items())), "refused": spread(self.refused_s), "answered": spread(self.answered_s)}


def spread(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    order = sorted(seconds)
    return {"median_s": round(order[len(order) // 2], 3), "p99_s": round(order[int(len(order) * 0.99)], 3), "num": len(order)}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


MEGABYTE = body(prompt="The quick brown fox. " * 49_000, max_tokens=4)


def heavy_bodies() -> list[tuple[str, bytes]]:
    """Legal and hostile, each the most of its kind."""
    stops = [f"{number:02}" + "x" * 1022 for number in range(16)]
    biases = {str(number): 0.5 for number in range(1024)}
    return [
        (COMPLETIONS, body(prompt="Hello", n=64, stop=stops, logit_bias=biases, max_tokens=8)),
        (COMPLETIONS, body(prompt="Hello", n=16, logprobs=20, max_tokens=64)),
        (COMPLETIONS, body(prompt="fox " * 400, echo=True, logprobs=20, max_tokens=4)),
        (COMPLETIONS, MEGABYTE),
        (COMPLETIONS, body(prompt=[5] * 140_000, max_tokens=4)),
        (CHAT, body(messages=[{"role": "user", "content": "Hello"}], max_tokens=16)),
        (CHAT, body(messages=[{"role": "user", "content": "<|im_end|>" * 90_000}], max_tokens=4)),
    ]


async def mixed(session: aiohttp.ClientSession) -> dict[str, Any]:
    """350 legal and hostile requests at once."""
    outcomes, bodies = Outcomes(), heavy_bodies()
    await asyncio.gather(*(outcomes.ask(session, *bodies[number % len(bodies)]) for number in range(350)))
    return outcomes.figures()


async def megabytes(session: aiohttp.ClientSession) -> dict[str, Any]:
    """Prompts of a megabyte from 16 clients in a loop, for ten seconds."""
    outcomes, until = Outcomes(), time.monotonic() + 10

    async def client() -> None:
        while time.monotonic() < until:
            await outcomes.ask(session, COMPLETIONS, MEGABYTE)

    await asyncio.gather(*(client() for _ in range(16)))
    return outcomes.figures()


async def abandoned(session: aiohttp.ClientSession) -> dict[str, Any]:
    """44 long echoes with log-probabilities, streamed and left after their first bytes or half a second; then 42 short requests."""
    echo = body(prompt="fox and " * 500, echo=True, logprobs=20, max_tokens=4, stream=True)

    async def leave() -> None:
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(0.5), session.post(COMPLETIONS, data=echo, headers={"content-type": "application/json"}) as answer:
                await answer.content.read(1)

    await asyncio.gather(*(leave() for _ in range(44)))
    outcomes = Outcomes()
    short = body(prompt="Hello", max_tokens=1, echo=True, logprobs=1)
    await asyncio.gather(*(outcomes.ask(session, COMPLETIONS, short) for _ in range(42)))
    return outcomes.figures()


async def burst(session: aiohttp.ClientSession) -> dict[str, Any]:
    """A thousand short prompts at once."""
    outcomes = Outcomes()
    await asyncio.gather(*(outcomes.ask(session, COMPLETIONS, body(prompt=f"Hello {number}", max_tokens=1)) for number in range(1000)))
    return outcomes.figures()


async def templates(session: aiohttp.ClientSession) -> dict[str, Any]:
    """A template whose loop a client's word starts: 8 such conversations, and 40 harmless ones beside them."""
    hostile, harmless = Outcomes(), Outcomes()
    await asyncio.gather(
        *(hostile.ask(session, CHAT, body(messages=[{"role": "user", "content": "loop"}], max_tokens=1)) for _ in range(8)),
        *(harmless.ask(session, CHAT, body(messages=[{"role": "user", "content": f"Hi {n}"}], max_tokens=1)) for n in range(40)),
    )
    return {"hostile": hostile.figures(), "harmless": harmless.figures()}


Storm = Callable[[aiohttp.ClientSession], Awaitable[dict[str, Any]]]
STORMS: tuple[Storm, ...] = (mixed, megabytes, abandoned, burst, templates)


async def weather(storm: Storm, made: Server) -> dict[str, Any]:
    """One storm on a fresh server. What remains is what the processes have more than before it, ten seconds after the last answer."""
    connector, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)

    async def look() -> None:
        while True:
            made.look()
            await asyncio.sleep(0.05)

    async with aiohttp.ClientSession(made.url, connector=connector, timeout=patience) as session:
        made.look()
        idle_gateway, idle_family = made.gateway_mib, made.family_mib
        looking = asyncio.create_task(look())
        async with neighbours(session) as others:
            began = time.monotonic()
            figures = await storm(session)
            took = time.monotonic() - began
        looking.cancel()
        await asyncio.sleep(REST_S)
        made.look()
        remains = {
            "remains_gateway_mib": round(made.gateway_mib - idle_gateway, 1),
            "remains_gateway_and_workers_mib": round(made.family_mib - idle_family, 1),
        }
        async with session.get("/metrics") as page:
            lag = worst_lag(await page.text())
    beside = {"worst_gap_s": round(others.worst_gap_s, 3), "whole": others.num_whole, "lost": others.num_lost}
    return {"took_s": round(took, 2), **figures, "neighbours": beside, "loop_lag_s": lag, **memory(made), **remains}


def worst_lag(page: str) -> str:
    """Between which two bounds the event loop's worst look came late, since the start: "0.25..0.5"."""
    counts = re.findall(r'^headrace_gateway_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', page, re.MULTILINE)
    bounds = [bound for bound, _ in counts]
    first = next(number for number, (_, count) in enumerate(counts) if float(count) == float(counts[-1][1]))
    return f"{bounds[first - 1] if first else '0'}..{bounds[first]}"


def memory(made: Server) -> dict[str, float]:
    return {"peak_gateway_mib": round(made.peak_gateway_mib, 1), "peak_gateway_and_workers_mib": round(made.peak_family_mib, 1)}


def model_folder(source: Path, home: Path, template: str | None) -> Path:
    """The bundled model, perhaps with another template."""
    folder = home / MODEL
    shutil.copytree(source / "src" / "headrace" / "bundled" / MODEL, folder, dirs_exist_ok=True)
    if template is not None:
        path = folder / "chat_template.jinja"
        path.write_text(template + path.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def measure(source: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for storm in STORMS:
        if storm.__name__ in names:
            with tempfile.TemporaryDirectory() as home:
                folder = model_folder(source, Path(home), STEERED if storm is templates else None)
                with server(source, folder) as made:
                    found[storm.__name__] = {"what": storm.__doc__, **asyncio.run(weather(storm, made))}
            print(json.dumps({storm.__name__: found[storm.__name__]}), flush=True)
    if "bomb" in names:
        with tempfile.TemporaryDirectory() as home:
            began = time.monotonic()
            with server(source, model_folder(source, Path(home), BOMB)) as made:
                started = bool(made.url)
        said = [line for line in made.said.splitlines() if "chat_template" in line]
        found["bomb"] = {
            "what": f"The gateway's start over the template {BOMB}",
            "serves": started,
            "took_s": round(time.monotonic() - began, 2),
            "said": said[:1],
            **memory(made),
        }
        print(json.dumps(found["bomb"]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT, help="source tree whose server is measured")
    parser.add_argument("--only", nargs="*", default=[*(storm.__name__ for storm in STORMS), "bomb"])
    given = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=given.source, capture_output=True, text=True, check=True
    ).stdout.strip()
    # The name of the processor and the cores: enough to know one machine's figures from another's, without loading torch.
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    path = RESULTS / f"text-{commit}.json"
    known = json.loads(path.read_text(encoding="utf-8"))["storms"] if path.exists() else {}  # storms may be measured one by one
    load_average = os.getloadavg()
    figures = known | measure(given.source.resolve(), given.only)
    RESULTS.mkdir(parents=True, exist_ok=True)
    machine = f"{cpu}, {os.cpu_count()} cores"
    made = {"commit": commit, "machine": machine, "caption": CAPTION, "load_average": load_average, "storms": figures}
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
