"""Prints what `headrace serve` announces once it answers: what was decided at start and why, the URL, and a command to try it.

On a terminal the announcement is a few lines on stderr. Elsewhere it is log events, so that the stream holds nothing but the log; the last
event has the URL.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from headrace.wire.listening import shown_host

if TYPE_CHECKING:
    from http.client import HTTPConnection

    from headrace.cli.config.sections import ServeConfig
    from headrace.fleet.supervisor import FleetReady

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 30.0
"""A first engine has this long. Then the announcement is made anyway."""

STRAGGLERS_S = 5.0
"""The other replicas have this long, once one answers."""

POLL_S = 0.25

OPEN = "No API key is set: whoever reaches this address may use it."
ANY_PAGE = "allowed_origins is * and no API key is set: every web page that is opened in reach of this address may use it."


def announce_when_ready(config: ServeConfig, ready: FleetReady) -> None:
    """The gateway runs when this is called, but may still be connecting to engines. Engines elsewhere may not have been started."""
    url = _url(ready.gateway)
    began = time.monotonic()
    is_serving = _becomes_ready(url, "/ready", began + READY_TIMEOUT_S)
    is_whole = is_serving and not (ready.failed or ready.starting)
    is_whole = is_whole and _becomes_ready(url, "/ready?strict", time.monotonic() + STRAGGLERS_S)
    warnings = [f"{name} cannot be started: {reason}" for name, reason in ready.failed.items()]
    warnings += [f"{name} is still starting." for name in ready.starting]
    if not is_serving:
        warnings.append(f"Not ready yet, after {READY_TIMEOUT_S:g} s: see {url}/ready?strict for what is missing.")
    elif not is_whole and not warnings:
        warnings.append(f"Not every replica is ready: see {url}/ready?strict for what is missing.")
    announce(config, ready, *warnings)


def _becomes_ready(url: str, path: str, deadline: float) -> bool:
    while not (is_serving := _is_serving(url, path)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return is_serving


def _is_serving(url: str, path: str) -> bool:
    """/ready answers 200 if one replica is ready, /ready?strict if all are. `allowed_hosts` does not apply to probes."""
    from http.client import HTTPException

    connection = _connection(url)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _connection(url: str) -> HTTPConnection:
    import ssl
    from http.client import HTTPConnection, HTTPSConnection

    parts = urlsplit(url)
    host = unquote(parts.hostname or "")  # an address with a zone has its percent sign escaped
    if parts.scheme == "http":
        return HTTPConnection(host, parts.port, timeout=2.0)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate names another host; nothing secret is sent
    return HTTPSConnection(host, parts.port, timeout=2.0, context=context)


def announce(config: ServeConfig, ready: FleetReady, *warnings: str) -> None:
    """Print text if stderr is a terminal and the log is not JSON; else write log events. `cli.chat.child` reads either form."""
    from headrace.cli.config.state import has_stored_keys
    from headrace.gateway.http.config import ANY_ORIGIN
    from headrace.observe.logs import LogFormat

    url, names = _url(ready.gateway), [model.served_name for model in config.models]
    serving = f"Serving {', '.join(names)} at {url}"
    open_to = ANY_PAGE if ANY_ORIGIN in config.gateway.allowed_origins else OPEN
    wants_key = bool(config.gateway.api_keys) or has_stored_keys(config.state, config.gateway.store)
    renamed = [model.renamed for model in config.models if model.renamed]
    notes = [*([] if wants_key else [open_to]), *renamed, *warnings]
    if sys.stderr.isatty() and config.log_format != LogFormat.JSON:
        _print(_decided(ready), notes, [serving, "", "  Try it:", *_curl(url, names[0], wants_key=wants_key)])
        return
    for replicas, lines in _decided(ready).items():
        for line in lines:
            log.info("decided (%s): %s", replicas, line)
    for note in notes:
        log.log(logging.WARNING if note in warnings else logging.INFO, "%s", note)
    log.info("%s", serving, extra={"facts": {"url": url, "models": names}})


def _decided(ready: FleetReady) -> dict[str, list[str]]:
    """Replicas with the same decisions, joined -> the lines of these decisions."""
    names: dict[tuple[str, ...], list[str]] = {}
    for replica, facts in ready.replicas.items():
        decided = facts.get("decided")
        if isinstance(decided, list | tuple) and decided:
            names.setdefault(tuple(map(str, decided)), []).append(replica)
    return {", ".join(replicas): list(lines) for lines, replicas in names.items()}


def _print(decided: Mapping[str, list[str]], notes: list[str], serving: list[str]) -> None:
    lines = [""]
    for replicas, what in decided.items():
        lines += [f"  Decided at start ({replicas}):", *(f"    {line}" for line in what)]
    lines += [f"  {note}" for note in notes]
    print("\n".join([*lines, "", *serving, ""]), file=sys.stderr, flush=True)


def _url(gateway: Mapping[str, object]) -> str:
    """The URL for a client on this machine. gateway: the facts that the gateway reported when it served"""
    host = str(gateway.get("host", ""))
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{gateway.get('scheme', 'http')}://{shown_host(local)}:{gateway.get('port')}"


def _curl(url: str, model: str, *, wants_key: bool) -> list[str]:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    key = " -H 'Authorization: Bearer YOUR_KEY'" if wants_key else ""
    return [f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\", f"    -d '{body}'"]
