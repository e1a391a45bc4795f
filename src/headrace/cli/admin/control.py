"""`headrace status|reload|rollout|scale|drain|sleep|wake` operate a deployment that runs. docs/control.md says what each does."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.admin.directory import AdminFiles, AdminUrl
from headrace.cli.exits import CommandExitCode, UsageRefused
from headrace.core.errors import counted
from headrace.core.sleep import SleepLevel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cli.admin.client import AdminClient

RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Which deployment: its run directory. Default: the only one of this user.")
]
AllowOutage = Annotated[bool, typer.Option("--allow-outage", help="Go on where no replica of the model serves in between.")]


END_POLL_S = 0.1
END_GRACE_S = 30.0
"""Seconds beyond `--within` in which `headrace drain --all` waits for the deployment's end."""


def status(
    run_dir: RunDir = None,
    admin: AdminUrl = None,
    tls_dir: AdminFiles = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a running deployment: its gateways, models and replicas."""
    answer = open_deployment(run_dir, admin, tls_dir).status()
    print(json.dumps(answer, indent=1) if as_json else "\n".join(_shown(answer)))


def reload(run_dir: RunDir = None, admin: AdminUrl = None, tls_dir: AdminFiles = None) -> None:
    """Read the configuration file of a running deployment again, print what changed, and apply it."""
    raise typer.Exit(command(open_deployment(run_dir, admin, tls_dir), "reload", {}))


def rollout(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Default: every model, one after another.")] = None,
    max_surge: Annotated[
        int, typer.Option("--max-surge", metavar="0|1", help="1: a successor serves before the old one leaves. 0: no memory for both.")
    ] = 1,
    allow_outage: AllowOutage = False,
    run_dir: RunDir = None,
    admin: AdminUrl = None,
    tls_dir: AdminFiles = None,
) -> None:
    """Replace the replicas of a model by new processes, one at a time, while requests run."""
    raise typer.Exit(
        command(open_deployment(run_dir, admin, tls_dir), "rollout", {"model": model, "max_surge": max_surge, "allow_outage": allow_outage})
    )


def scale(
    wanted: Annotated[str, typer.Argument(metavar="MODEL=N", help="A model and how many replicas it should have.")],
    run_dir: RunDir = None,
    admin: AdminUrl = None,
    tls_dir: AdminFiles = None,
) -> None:
    """Run more or fewer replicas of a model, until the next reload."""
    model, _, number = wanted.rpartition("=")
    if not (model and number.isascii() and number.isdigit()):
        raise UsageRefused(f"MODEL=N: {wanted!r} is not a model's name and a number. Write headrace scale tiny=2.")
    raise typer.Exit(command(open_deployment(run_dir, admin, tls_dir), "scale", {"model": model, "replicas": int(number)}))


def drain(
    within: Annotated[float, typer.Option("--within", metavar="S", help="Seconds for what runs; what is open then moves or ends.")],
    replica: Annotated[str | None, typer.Argument(metavar="REPLICA", help="As headrace status names it.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole deployment, which then ends.")] = False,
    allow_outage: AllowOutage = False,
    run_dir: RunDir = None,
    admin: AdminUrl = None,
    tls_dir: AdminFiles = None,
) -> None:
    """Retire a replica, or the whole deployment, within a time: no new work, and what has not finished moves to another replica."""
    if (replica is not None) == everything:
        raise UsageRefused("REPLICA and --all: give one of them")
    if not math.isfinite(within):
        raise UsageRefused(f"--within: {within} is not a number of seconds")
    code = command(
        open_deployment(run_dir, admin, tls_dir),
        "drain",
        {"replica": replica, "within_s": within, "allow_outage": allow_outage},
        ends_within_s=within,
    )
    raise typer.Exit(code)


def sleep(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model of this deployment.")],
    level: Annotated[SleepLevel, typer.Option("--level", help="ram: give back what is no weight. disk: weights too.")] = SleepLevel.RAM,
    run_dir: RunDir = None,
    admin: AdminUrl = None,
    tls_dir: AdminFiles = None,
) -> None:
    """Put the engines of a model to sleep, once each has finished its requests."""
    raise typer.Exit(command(open_deployment(run_dir, admin, tls_dir), "sleep", {"model": model, "level": level.value}))


def wake(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model of this deployment.")],
    run_dir: RunDir = None,
    admin: AdminUrl = None,
    tls_dir: AdminFiles = None,
) -> None:
    """Wake the engines of a model."""
    raise typer.Exit(command(open_deployment(run_dir, admin, tls_dir), "wake", {"model": model}))


def open_deployment(run_dir: Path | None, admin: str | None, tls_dir: Path | None) -> AdminClient:
    from headrace.cli.admin.client import open_client

    return open_client(run_dir, admin, tls_dir)


def command(client: AdminClient, name: str, body: Mapping[str, object], *, ends_within_s: float = 0.0) -> CommandExitCode:
    for said in client.command(name, body):
        match said["event"]:
            case "progress":
                print(said["text"], flush=True)
            case "done":
                return _ended(client, ends_within_s) if "replica" in body and body["replica"] is None else CommandExitCode.OK
            case "refused":
                print(f"headrace: nothing was changed: {said['reason']}", file=sys.stderr)
                return CommandExitCode.CONFIG
            case _:
                print(f"headrace: {said['reason']}", file=sys.stderr)
    return CommandExitCode.FAILED


def _ended(client: AdminClient, within_s: float) -> CommandExitCode:
    print(f"the deployment drains for up to {within_s:g} s", flush=True)
    deadline = time.monotonic() + within_s + END_GRACE_S
    while client.is_running():
        if time.monotonic() > deadline:
            print("headrace: it still runs; its log says more", file=sys.stderr)
            return CommandExitCode.FAILED
        time.sleep(END_POLL_S)
    print("it has ended")
    return CommandExitCode.OK


def _shown(status: Mapping[str, Any]) -> list[str]:
    from headrace.cli.admin.client import shown_place

    gateways = [f"{each['name']} (pid {each['pid']}{'' if each['serving'] else ', not serving'})" for each in status["gateways"]]
    lines = [f"at {shown_place(status)}", f"gateways: {', '.join(gateways)}"]
    if status["command"]:
        lines.append(f"command: {status['command']} is running")
    for model in status["models"]:
        lines += ["", *_shown_model(model)]
    if status["leaving"]:
        lines += ["", "of models that were removed:", *map(_shown_replica, status["leaving"])]
    return lines


def _shown_model(model: Mapping[str, Any]) -> list[str]:
    from headrace.cli.admin.client import shown_upstreams

    upstreams = shown_upstreams(model)
    if model["served"] == "elsewhere":
        lines = [f"{model['name']}: {', '.join(upstreams)}", *_shown_scaling(model)]
        return [*lines, f"  {model['failure']}"] if model["failure"] else lines
    ready = sum(replica["ready"] for replica in model["replicas"])
    rollout = ", a rollout is under way" if model["rollout"] else ""
    rollout += f": {model['canary']} is compared with the replicas before it" if model.get("canary") else ""
    version = f", version {model['version']}" if model.get("version") else ""
    state = f"{ready} of {model['wanted']} replicas ready{version}, revision {model['revision']}{rollout}"
    lines = [f"{model['name']}: {', '.join([state, *upstreams])}"]
    lines += _shown_scaling(model)
    lines += map(_shown_replica, model["replicas"])
    is_shown = any(replica["reason"] and replica["reason"] in model["failure"] for replica in model["replicas"])
    return lines if is_shown or not model["failure"] else [*lines, f"  {model['failure']}"]


def _shown_scaling(model: Mapping[str, Any]) -> list[str]:
    scaled = model.get("autoscale")
    if not scaled:
        return []
    used, hours = scaled.get("replica_hours_today"), scaled.get("replica_hours_per_day")
    day = "" if hours is None else f", {'?' if used is None else f'{used:g}'} of {hours:g} replica-hours of the day"
    return [f"  by its load, {scaled['min']} to {scaled['max']}{day}: {scaled['reason']}"]


def _shown_replica(replica: Mapping[str, Any]) -> str:
    is_odd = replica["phase"] == "serving" and not replica["ready"]
    pids = replica["pids"]
    process = f"{'pid' if len(pids) == 1 else 'pids'} {' '.join(map(str, pids))}" if pids else "no process"
    facts = [f"revision {replica['revision']}", process, f"{'?' if replica['open'] is None else replica['open']} open"]
    facts.append(counted(replica["starts"], "start"))
    state = f"  {replica['name']}: {replica['phase']}{', not ready' if is_odd else ''} ({', '.join(facts)})"
    return f"{state}: {replica['reason']}" if replica["reason"] else state
