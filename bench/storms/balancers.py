"""Runs HAProxy and nginx, with the files of deploy/, in front of two gateways: streams, a drain, a restart, sessions, models, TLS.

    python -m bench.storms.balancers [--streams 200] [--balancers haproxy nginx]        (`make servers` installs them)
        -> bench/results/storms/balancers.json

The files are used as they are, but for addresses, paths and the certificate. Both gateways have the same two fake engines. `--streams`
streams begin, a gateway is drained (SIGTERM) while they run, ends, is started anew, and as many streams begin again; beside them short
requests are sent all the time. A gateway's own log says which requests it answered. At last the only engine of a second model, "large", is
killed: its requests are refused, by both ports, and those for the other model are answered as ever.

cut, different       streams that did not end, or whose answer is not the one that the gateway itself gives
shares               part of the streams that each gateway had: of the first ones, and of those after the restart
gap_s, gap_direct_s  longest silence within a stream, through the balancer and without it
sessions             how many sessions, of how many, met one gateway; how many streams that were left and resumed were whole, and how many
                     met the gateway that began them
short_failed         short requests without an answer, by status
dead_model           statuses of requests for each model and port while "large" has no engine; seconds until it is answered again
drained_s, back_s    from SIGTERM to the gateway's end (exit status 0), and from its start until a request came to it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from bench.storms.by_hand import HERE, MODEL, HandStarted, HandStartedSite, free_port, site_by_hand
from bench.storms.common import RESULTS
from bench.storms.failover import quantiles
from headrace.fleet.authority import make_authority, make_certificate, pem_of_certificate, pem_of_key
from headrace.gateway.http.sse import NO_EVENT
from headrace.lab.environment import environment
from headrace.lab.report import write_json
from headrace.wire.tls.files import TlsRole

DEPLOY = Path(__file__).parents[2] / "deploy"
BALANCERS = ("haproxy", "nginx")
MODEL_SMALL, MODEL_LARGE = "small", "large"
"""The two models as the shipped files name them."""
STEP_S = 0.1
NUM_TOKENS = 120
"""Of a stream: 12 s at one token per STEP_S."""
EVERY_S = 0.05
"""Seconds between two short requests."""
SESSIONS, OF_SESSION = 8, 5
LEFT_AFTER, LEFT_S = 5, 0.5
"""Events after which a client leaves its stream, and seconds until it resumes it."""
LARGE_BODY_BYTES = 250_000
LOGGED_S = 2.0
FAILOVER_S = 0.0
"""Of the gateways, as docs/load_balancers.md has it: a lost model's requests are sent on by the balancer, and are not held."""
DEAD_S = 3.0
"""Seconds for which a model is left without its engine."""
BACK_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a balancer listens."""

    plain: int
    tls: int
    by_model: int


@dataclass(frozen=True, slots=True)
class Balanced:
    """A running balancer and the gateways behind it."""

    name: str
    ports: Ports
    gateways: dict[str, HandStarted]
    large_engine: HandStarted
    ca: str


def replaced(text: str, changes: dict[str, str]) -> str:
    """A shipped file with other addresses. Raises AssertionError where it has none of those that are to be changed."""
    for old, new in changes.items():
        assert old in text, f"{old} is not in the file"
        text = text.replace(old, new)
    return text


def write_files(name: str, folder: Path, ports: Ports, gateways: dict[str, HandStarted]) -> list[str]:
    """The shipped files with this storm's addresses; the command that runs the balancer in the foreground."""
    first, second = (gateway.address for gateway in gateways.values())
    servers = {"10.0.0.11:8000": first, "10.0.0.12:8000": second}
    listeners = {"8080": str(ports.plain), "8443": str(ports.tls)}
    if name == "haproxy":
        main = {
            "/etc/haproxy/": f"{folder}/",
            "/run/haproxy/": f"{folder}/",
            **{f"bind :{port}": f"bind 127.0.0.1:{at}" for port, at in listeners.items()},
        }
        files = {
            "haproxy.cfg": {**servers, **main},
            "by_model.cfg": {"10.0.0.13:8000": second, "bind :8081": f"bind 127.0.0.1:{ports.by_model}"},
        }
        command = ["haproxy", "-db", "-f", f"{folder}/haproxy.cfg", "-f", f"{folder}/by_model.cfg"]
    else:
        main = {
            "/etc/nginx/headrace.d/*.conf": f"{folder}/by_model.conf",
            "/etc/nginx/": f"{folder}/",
            "/run/": f"{folder}/",
            "/var/log/nginx/": f"{folder}/",
        }
        main |= {f"listen {port}": f"listen 127.0.0.1:{at}" for port, at in listeners.items()}
        files = {
            "nginx.conf": {**servers, **main},
            "by_model.conf": {"10.0.0.13:8000": second, "listen 8081": f"listen 127.0.0.1:{ports.by_model}"},
        }
        command = ["nginx", "-p", str(folder), "-c", f"{folder}/nginx.conf", "-g", "daemon off;"]
    for file, changes in files.items():
        (folder / file).write_text(replaced((DEPLOY / name / file).read_text(encoding="utf-8"), changes), encoding="utf-8")
    return command


def write_certificate(folder: Path) -> str:
    """site.pem and site.key as both balancers want them; the file of the authority that signed them."""
    now = datetime.now(UTC)
    authority = make_authority(now)
    key, certificate = make_certificate(authority, TlsRole.ENGINE, ["127.0.0.1"], now)
    (folder / "site.key").write_bytes(pem_of_key(key))
    (folder / "site.pem").write_bytes(pem_of_certificate(certificate) + pem_of_key(key))
    (folder / "ca.pem").write_bytes(pem_of_certificate(authority.certificate))
    return str(folder / "ca.pem")


@contextmanager
def balanced(name: str, site: HandStartedSite, gateways: dict[str, HandStarted], large_engine: HandStarted) -> Iterator[Balanced]:
    """The balancer until the block ends. Raises AssertionError with its log where it does not start."""
    folder = site.folder / name
    folder.mkdir()
    ports = Ports(free_port(), free_port(), free_port())
    ca = write_certificate(folder)
    command = write_files(name, folder, ports, gateways)
    running = HandStarted(command, HERE, ports.plain, folder / "log")
    running.start()
    try:
        running.wait_listening()
        yield Balanced(name, ports, gateways, large_engine, ca)
    finally:
        running.signal(signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.close()


# -- requests ---------------------------------------------------------------------------------------------------------------------------


def stream_body(number: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [5, 6, 7], "seed": number, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}


def short_body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [5, 6, 7], "seed": 1, "max_tokens": 1, "ignore_eos": True, **changes}


@dataclass(slots=True)
class Streamed:
    """What a client saw of a stream; error: "" for a whole answer."""

    name: str
    error: str = "no end"
    text: str = ""
    gap_s: float = 0.0
    has_begun: bool = False


class Clients:
    """Sends requests to one port, each with a name of its own, by which the gateways' logs know it (`x-request-id`)."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session, self._url = session, f"http://127.0.0.1:{port}/v1/completions"

    async def stream(self, found: Streamed, number: int, **headers: str) -> Streamed:
        last = None
        try:
            async with self._session.post(self._url, json=stream_body(number), headers={"x-request-id": found.name, **headers}) as response:
                if response.status != 200:
                    found.error = f"{response.status} {(await response.text())[:200]}"
                    return found
                async for raw in response.content:
                    if not raw.startswith(b"data: "):
                        continue
                    now = time.monotonic()
                    found.gap_s, last, found.has_begun = max(found.gap_s, now - (last or now)), now, True
                    if raw.startswith(b"data: [DONE]"):
                        found.error = ""
                        return found
                    event = json.loads(raw[6:])
                    if "error" in event:
                        found.error = str(event["error"]["message"])
                        return found
                    found.text += event["choices"][0]["text"]
        except aiohttp.ClientError as error:
            found.error = type(error).__name__
        return found

    async def resumed(self, name: str, number: int) -> str:
        """The text of a stream whose client leaves after LEFT_AFTER events, and which another one resumes as `name`."""
        body = stream_body(number)
        text, last_id = "", ""
        async with self._session.post(
            self._url, json=body, headers={"x-request-id": f"{name}-begun", "last-event-id": NO_EVENT}
        ) as response:
            num_read = 0
            async for raw in response.content:
                if raw.startswith(b"id: "):
                    last_id = raw[4:].decode().strip()
                elif raw.startswith(b"data: {"):
                    text, num_read = text + json.loads(raw[6:])["choices"][0]["text"], num_read + 1
                elif not raw.strip() and num_read == LEFT_AFTER:
                    break
        await asyncio.sleep(LEFT_S)
        found = Streamed(name)
        return text + (await self.stream(found, number, **{"last-event-id": last_id})).text

    async def short(self, name: str, *, path: str | None = None, headers: dict[str, str] | None = None, **changes: Any) -> tuple[int, str]:
        """Status and request id of a request that is answered in one piece; status 0 where there was no answer."""
        try:
            sent = {"x-request-id": name, **(headers or {})}
            async with self._session.post(path or self._url, json=short_body(**changes), headers=sent) as response:
                await response.read()
                return response.status, response.headers.get("x-request-id", "")
        except aiohttp.ClientError:
            return 0, ""


@asynccontextmanager
async def short_requests(clients: Clients, prefix: str) -> AsyncIterator[Counter[int]]:
    """Short requests all the time while inside; statuses of their answers."""
    statuses: Counter[int] = Counter()

    async def one(number: int) -> None:
        statuses[(await clients.short(f"{prefix}-short-{number}"))[0]] += 1

    async def send() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(100_000):
                tasks.create_task(one(number))
                await asyncio.sleep(EVERY_S)
                if is_over.is_set():
                    return

    is_over = asyncio.Event()
    sending = asyncio.create_task(send())
    try:
        yield statuses
    finally:
        is_over.set()
        await sending


async def answered_by(gateways: dict[str, HandStarted]) -> dict[str, str]:
    """Name that a client gave its request -> the gateway that answered it, by the logs, which are written a moment later."""
    await asyncio.sleep(LOGGED_S)
    found = {}
    for name, gateway in gateways.items():
        for line in gateway.log_path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["status"] in (200, 499) and (client := record.get("client_request_id")):
                found[client] = name
    return found


# -- the storm --------------------------------------------------------------------------------------------------------------------------


async def run_streams(clients: Clients, prefix: str, count: int) -> tuple[list[Streamed], list[asyncio.Task[Streamed]]]:
    """Streams that have all begun, and their tasks."""
    found = [Streamed(f"{prefix}-{number}") for number in range(count)]
    tasks = [asyncio.create_task(clients.stream(one, number % 8)) for number, one in enumerate(found)]
    deadline = time.monotonic() + NUM_TOKENS * STEP_S
    while not all(one.has_begun for one in found) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return found, tasks


async def shares(found: list[Streamed], gateways: dict[str, HandStarted]) -> dict[str, float]:
    by = await answered_by(gateways)
    counts = Counter(by.get(one.name, "none") for one in found)
    return {name: round(count / len(found), 3) for name, count in sorted(counts.items())}


async def drain_and_restart(balanced: Balanced, clients: Clients, prefix: str, count: int) -> dict[str, Any]:
    """Streams while the first gateway is drained, and as many after it is back."""
    first = next(iter(balanced.gateways.values()))
    async with short_requests(clients, prefix) as statuses:
        begun, tasks = await run_streams(clients, f"{prefix}-one", count)
        began = time.monotonic()
        first.signal(signal.SIGTERM)
        exit_status = await asyncio.to_thread(first.wait)
        drained_s = time.monotonic() - began
        before = await asyncio.gather(*tasks)
        first_shares = await shares(begun, balanced.gateways)
        first.start()
        began = time.monotonic()
        await asyncio.to_thread(first.wait_ready)
        num_known = len(first.log_path.with_suffix(".jsonl").read_bytes())
        while len(first.log_path.with_suffix(".jsonl").read_bytes()) == num_known and time.monotonic() - began < 30:
            await asyncio.sleep(0.05)
        back_s = time.monotonic() - began
        await asyncio.sleep(1.0)
        again, tasks = await run_streams(clients, f"{prefix}-two", count)
        after = await asyncio.gather(*tasks)
    return {
        "streams": before + after,
        "exit_status": exit_status,
        "drained_s": round(drained_s, 2),
        "back_s": round(back_s, 2),
        "shares": {"before": first_shares, "after": await shares(again, balanced.gateways)},
        "short": sum(statuses.values()),
        "short_failed": {str(status): number for status, number in statuses.items() if status != 200},
    }


async def sessions(balanced: Balanced, clients: Clients, prefix: str, unbroken: list[Streamed]) -> dict[str, Any]:
    """Whether requests of one session meet one gateway, the sessions both, and a resumed stream the gateway that began it."""
    for number in range(SESSIONS * OF_SESSION):
        session = number % SESSIONS
        await clients.short(f"{prefix}-session-{session}-{number}", headers={"x-session-id": f"{prefix}-{session}"})
    names = [f"{prefix}-resumed-{number}" for number in range(SESSIONS)]
    texts = await asyncio.gather(*(clients.resumed(name, number) for number, name in enumerate(names)))
    by = await answered_by(balanced.gateways)
    met = {session: {by[name] for name in by if name.startswith(f"{prefix}-session-{session}-")} for session in range(SESSIONS)}
    return {
        "sessions_at_one_gateway": sum(len(gateways) == 1 for gateways in met.values()),
        "gateways_of_sessions": len(set().union(*met.values())),
        "resumed_whole": sum(text == one.text for text, one in zip(texts, unbroken, strict=True)),
        "resumed_where_begun": sum(by.get(name, "none") == by.get(f"{name}-begun") for name in names),
        "of": SESSIONS,
    }


async def by_model(balanced: Balanced, clients: Clients, prefix: str) -> dict[str, Any]:
    """The statuses of requests that name their model as this balancer reads it, and as it cannot; "large" is the second gateway's alone."""
    base = f"http://127.0.0.1:{balanced.ports.by_model}"
    url, found = f"{base}/v1/completions", {}
    for number in range(4):
        names = {"headers": {"x-model": "large"}} if balanced.name == "nginx" else {}
        found[f"large {number}"] = (await clients.short(f"{prefix}-large-{number}", path=url, model="large", **names))[0]
    if balanced.name == "nginx":
        found["path"] = (await clients.short(f"{prefix}-large-path", path=f"{base}/large/v1/completions", model="large"))[0]
        found["not named"] = (await clients.short(f"{prefix}-none", path=url))[0]
    else:
        found["body too large"] = (await clients.short(f"{prefix}-none", path=url, user="x" * LARGE_BODY_BYTES))[0]
    by = await answered_by(balanced.gateways)
    return {"statuses": found, "large_at": sorted({by[name] for name in by if name.startswith(f"{prefix}-large")})}


async def dead_model(balanced: Balanced, clients: Clients, prefix: str) -> dict[str, Any]:
    """What becomes of requests for two models while the engine of one is dead, through the port by model and the one for all."""
    url = f"http://127.0.0.1:{balanced.ports.by_model}/v1/completions"
    statuses: dict[str, Counter[int]] = {
        f"{model} {port}": Counter() for model in (MODEL_SMALL, MODEL_LARGE) for port in ("by model", "all")
    }

    async def ask(model: str, port: str, number: int) -> int:
        headers = {"x-model": model} if balanced.name == "nginx" and port == "by model" else {}
        name = f"{prefix}-dead-{model}-{number}"
        return (await clients.short(name, path=url if port == "by model" else None, headers=headers, model=model))[0]

    balanced.large_engine.signal(signal.SIGKILL)
    await asyncio.to_thread(balanced.large_engine.wait, 20)
    until = time.monotonic() + DEAD_S
    number = 0
    while time.monotonic() < until:
        for case, found in statuses.items():
            model, _, port = case.partition(" ")
            found[await ask(model, port, number)] += 1
        number += 1
    balanced.large_engine.start()
    began = time.monotonic()
    while await ask(MODEL_LARGE, "by model", number) != 200 and time.monotonic() < began + BACK_WITHIN_S:
        await asyncio.sleep(EVERY_S)
        number += 1
    return {"statuses": {case: dict(found) for case, found in statuses.items()}, "back_s": round(time.monotonic() - began, 2)}


async def over_tls(balanced: Balanced, clients: Clients, prefix: str) -> int:
    context = ssl.create_default_context(cafile=balanced.ca)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        secure = Clients(session, balanced.ports.tls)
        return (await secure.short(f"{prefix}-tls", path=f"https://127.0.0.1:{balanced.ports.tls}/v1/completions"))[0]


async def storm(
    name: str, site: HandStartedSite, gateways: dict[str, HandStarted], large_engine: HandStarted, count: int
) -> dict[str, Any]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    with balanced(name, site, gateways, large_engine) as running:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            direct = Clients(session, next(iter(gateways.values())).port)
            unbroken = await asyncio.gather(*(direct.stream(Streamed(f"{name}-direct-{seed}"), seed) for seed in range(8)))
            clients = Clients(session, running.ports.plain)
            found = await drain_and_restart(running, clients, name, count)
            streams: list[Streamed] = found.pop("streams")
            whole = [one for one in streams if not one.error]
            return {
                "streams": len(streams),
                "cut": dict(Counter(one.error for one in streams if one.error)),
                "different": sum(one.text != unbroken[int(one.name.rpartition("-")[2]) % 8].text for one in whole),
                "gap_s": quantiles([one.gap_s for one in whole]),
                "gap_direct_s": quantiles([one.gap_s for one in unbroken]),
                **found,
                "sessions": await sessions(running, clients, name, unbroken),
                "by_model": await by_model(running, clients, name),
                "tls_status": await over_tls(running, clients, name),
                "dead_model": await dead_model(running, clients, name),
            }


def run(names: list[str], count: int) -> dict[str, dict[str, Any]]:
    """Raises SystemExit where a balancer is not installed."""
    if missing := [name for name in names if shutil.which(name) is None]:
        raise SystemExit(f"{' and '.join(missing)} not installed: run `make servers`")
    with site_by_hand() as site:
        options = {"max_num_seqs": 2 * count + 64, "max_num_batched_tokens": 8192}
        engines = [site.engine(f"e{number}", fake={"step_seconds": STEP_S}, engine=options) for number in range(2)]
        large_engine = site.engine("large0", fake={"step_seconds": STEP_S}, engine=options)
        for engine in (*engines, large_engine):
            engine.wait_serving()
        replicas = {f"e{number}": engine.address for number, engine in enumerate(engines)}
        gateways = {}
        for name in ("gateway1", "gateway2"):
            log = str(site.folder / f"{name}.jsonl")
            gateways[name] = site.gateway(
                name,
                replicas,
                aliases=(MODEL_SMALL,),
                further={MODEL_LARGE: {"large0": large_engine.address}},
                request_log=log,
                timeouts={"failover_s": FAILOVER_S},
            )
        for gateway in gateways.values():
            gateway.wait_ready()
        found = {}
        for name in names:
            found[name] = asyncio.run(storm(name, site, gateways, large_engine, count))
            print(name, json.dumps(found[name], indent=1), flush=True)
    return found


def broken_promises(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What breaks a promise, one line each. nginx cannot send a resumed stream where it began."""
    for name, seen in found.items():
        for key in ("cut", "different", "short_failed", "exit_status"):
            if seen[key]:
                yield f"{name}: {key} {seen[key]}"
        for when, parts in seen["shares"].items():
            if not all(0.35 <= parts.get(gateway, 0) <= 0.65 for gateway in ("gateway1", "gateway2")):
                yield f"{name}: shares {when} the restart: {parts}"
        if seen["sessions"]["sessions_at_one_gateway"] != SESSIONS or seen["sessions"]["resumed_whole"] != SESSIONS:
            yield f"{name}: {seen['sessions']}"
        if name == "haproxy" and seen["sessions"]["resumed_where_begun"] != SESSIONS:
            yield f"{name}: {seen['sessions']}"
        if seen["by_model"]["large_at"] != ["gateway2"]:
            yield f"{name}: {seen['by_model']}"
        for case, statuses in seen["dead_model"]["statuses"].items():
            if {*statuses} != {503 if case.startswith(MODEL_LARGE) else 200}:
                yield f"{name}: {case}, while {MODEL_LARGE} has no engine: {statuses}"
        if seen["dead_model"]["back_s"] >= BACK_WITHIN_S:
            yield f"{name}: {MODEL_LARGE} was not answered within {BACK_WITHIN_S:g} s of its engine's start"
        if seen["tls_status"] != 200:
            yield f"{name}: status {seen['tls_status']} over TLS"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--balancers", nargs="+", choices=BALANCERS, default=list(BALANCERS))
    given = parser.parse_args()
    found = run(given.balancers, given.streams)
    broken = list(broken_promises(found))
    print("\n".join(broken) or "every promise was kept")
    versions = {name: subprocess.run([name, "-v"], capture_output=True, text=True, check=True) for name in given.balancers}
    shown = {name: (done.stdout or done.stderr).splitlines()[0] for name, done in versions.items()}
    path = Path(RESULTS / "balancers.json")
    write_json(
        path, {"environment": asdict(environment()), "arguments": vars(given), "versions": shown, "balancers": found, "broken": broken}
    )


if __name__ == "__main__":
    main()
