"""Runs llama.cpp through its own binaries: `llama-batched-bench` for prefill and decode, `llama-server` for everything asked as
requests.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.peers.engines import CannotRun, peak_of
from bench.peers.rows import DECODE_TOKENS, NUM_MIXED, PREFILL_REPEATS, STARTUP_PROMPT, Figure, Ids, decode_prompt, measure, prefill_figure
from bench.peers.servers import MODEL_NAME, Server, ServerLaunch, serving
from headrace.tensor.host.cpu_features import read_cpu_features

KINDS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
WITHOUT_BF16 = {**KINDS, "bf16": "F16"}
"""The fastest format of each width on a CPU, and on one without bfloat16 products."""
CONTEXT_PER_SLOT = 640
BENCH_TIMEOUT_S = 900.0
WARM_UP_REQUESTS, WARM_UP_PROMPT, WARM_UP_TOKENS = 8, 128, 8


def gguf_kinds() -> dict[str, str]:
    """Precision -> the GGUF format measured on this CPU."""
    return KINDS if read_cpu_features().has_bf16 else WITHOUT_BF16


def gguf_file(model: Path, kind: str) -> Path:
    return model.with_name(f"{model.name}.gguf") / f"{kind.lower()}.gguf"


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """binaries: folder of the build; weights: a GGUF file."""

    binaries: Path
    weights: Path
    threads: int

    @property
    def setting(self) -> dict[str, object]:
        return {"weights": self.weights.name, "threads": self.threads, "batch": 2048, "ubatch": 512}

    def figure(self, row: str) -> Figure:
        """The figure of a prefill or decode row."""
        kind, _, number = row.partition("-")
        if kind == "prefill":
            seconds = tuple(self._bench(int(number), 1, 1)["t_pp"] for _ in range(PREFILL_REPEATS))
            return prefill_figure(int(number), seconds)
        entry = self._bench(decode_prompt(int(number)), DECODE_TOKENS, int(number))
        return Figure(entry["speed_tg"], "tok/s", (entry["t_pp"], entry["t_tg"]))

    def mixed(self, seed: int) -> tuple[Figure, int]:
        """(the mixed row's figure by a server that is warm, peak resident bytes after it)."""
        with self.server() as server:
            server.ask([list(range(100, 100 + WARM_UP_PROMPT))] * WARM_UP_REQUESTS, [WARM_UP_TOKENS] * WARM_UP_REQUESTS)
            return measure(f"mixed-{NUM_MIXED}", server.ask, seed=seed), server.peak_memory_bytes()

    def startup(self) -> Figure:
        """Seconds from process start to the first token."""
        began = time.perf_counter()
        with self.server() as server:
            server.ask([list(range(100, 100 + STARTUP_PROMPT))], [1])
            seconds = time.perf_counter() - began
        return Figure(seconds, "s", (seconds,))

    def _bench(self, prompt: int, tokens: int, streams: int) -> dict[str, float]:
        context = (prompt + tokens) * streams + 256
        command = [self.binaries / "llama-batched-bench", "-m", self.weights, "-c", context, "-b", 2048, "-ub", 512, "-t", self.threads]
        command += ["-npp", prompt, "-ntg", tokens, "-npl", streams, "--output-format", "jsonl"]
        try:
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=BENCH_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotRun(f"llama-batched-bench: {error}") from error
        entries = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not entries:
            raise CannotRun(f"llama-batched-bench ended with {done.returncode}: {done.stderr[-300:]}")
        entry: dict[str, float] = entries[-1]
        return entry

    @property
    def server_launch(self) -> ServerLaunch:
        command = [self.binaries / "llama-server", "-m", self.weights, "-t", self.threads, "-c", NUM_MIXED * CONTEXT_PER_SLOT]
        command += ["-np", NUM_MIXED, "-b", 2048, "-ub", 512, "--alias", MODEL_NAME, "--no-cache-prompt"]
        return ServerLaunch(command=tuple(map(str, command)), ready="/health")

    @contextmanager
    def server(self) -> Iterator[Client]:
        with serving(self.server_launch) as server:
            yield Client(server)


@dataclass(frozen=True, slots=True)
class Client:
    """Asks llama-server in its own dialect."""

    server: Server

    def ask(self, prompts: list[Ids], max_tokens: list[int]) -> float:
        """All requests at once, a connection each."""
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            made = list(pool.map(self._complete, prompts, max_tokens))
        seconds = time.perf_counter() - began
        if made != max_tokens:
            raise CannotRun("llama-server made another number of tokens than asked for")
        return seconds

    def _complete(self, prompt: Ids, count: int) -> int:
        body = {"prompt": prompt, "n_predict": count, "ignore_eos": True, "temperature": 0}
        status, answer = self._request("POST", "/completion", body)
        if status != 200:
            raise CannotRun(f"llama-server answered {status}")
        return int(json.loads(answer)["tokens_predicted"])

    def _request(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=BENCH_TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def peak_memory_bytes(self) -> int:
        with suppress(OSError, psutil.Error):
            return peak_of(self.server.pid)
        return 0


def llama_cpp(model: Path, precision: str, envs: Path, threads: int) -> LlamaCpp:
    """Raises CannotRun when the build or the converted weights are missing."""
    weights = gguf_file(model, gguf_kinds()[precision])
    binaries = envs / "llama.cpp"
    for path in (binaries / "llama-batched-bench", binaries / "llama-server", weights):
        if not path.exists():
            raise CannotRun(f"{path} does not exist")
    return LlamaCpp(binaries, weights, threads)
