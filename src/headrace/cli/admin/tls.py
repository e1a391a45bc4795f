"""`headrace tls init` makes the certificates for the wire between machines, and says what to copy where."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.fleet.authority import SiteFolder

tls_app = typer.Typer(help="Make certificates for engines on other machines.", no_args_is_help=True, rich_markup_mode=None)

TARGET = "/etc/headrace/{role}"

DAYS_OF_WARNING = 60


@tls_app.callback()
def _group() -> None:
    """Keeps `init` a sub-command although it is the only one."""


@tls_app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made where it is not there. Its authority.key stays on this machine.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="NAME", help="Name or address at which gateways reach an engine's machine: gpu1,10.0.0.7; again for more."
        ),
    ] = None,
    rank: Annotated[
        list[str] | None,
        typer.Option("--rank", metavar="NAME", help="The same of a machine with a rank of a replica that is on several machines."),
    ] = None,
) -> None:
    """Make a private authority for a site, a certificate for its gateways and one for each engine host.

    What is there is kept; a host is added, and a folder that was removed made anew, by the same command later.
    """
    from headrace.fleet.authority import init_site, other_folders

    hosts, ranks = ([[name.strip() for name in each.split(",")] for each in given or ()] for given in (host, rank))
    made = init_site(folder, hosts, ranks)
    print("\n".join(_shown(folder, made, other_folders(folder, made))))


def _shown(folder: Path, made: list[SiteFolder], others: list[SiteFolder]) -> list[str]:
    from headrace.wire.tls.files import TlsRole

    lines = [f"{folder}: the authority of this site. Keep {folder}/authority.key on this machine."]
    for each in made:
        lines += ["", *_shown_folder(each)]
    if others:
        lines.append("")
    for each in others:
        flag = "--rank" if each.role is TlsRole.RANK else "--host"
        lines += _shown_state(each, f"run this command with {flag} {','.join(each.names)}")
    if len(made) == 1 and not others:
        lines += ["", f"For each machine with engines: headrace tls init {folder} --host NAME"]
    return lines


def _shown_state(found: SiteFolder, remake: str) -> list[str]:
    days = (found.valid_until - datetime.now(UTC)).days
    state = "made" if found.is_new else "kept as it is"
    lines = [f"{found.path}: {state}, valid until {found.valid_until:%Y-%m-%d}."]
    if days < DAYS_OF_WARNING:
        lines.append(f"  It expires in {days} days. Remove the folder, {remake}, and copy it again; nothing has to be restarted.")
    return lines


def _shown_folder(made: SiteFolder) -> list[str]:
    from headrace.wire.tls.files import TlsRole

    target = TARGET.format(role=made.role)
    lines = _shown_state(made, "run this command again")
    host = "GATEWAY_HOST" if made.role is TlsRole.GATEWAY else _host(made.names[0])
    lines.append(f"  ssh {host.strip('[]')} mkdir -p -m 700 {target}; scp {made.path}/* {host}:{target}/")
    if made.role is TlsRole.ENGINE:
        return [*lines, f"  there: headrace engine MODEL --listen {host}:7001 --tls-dir {target}"]
    if made.role is TlsRole.RANK:
        return [*lines, f"  there: headrace engine MODEL -pp N --rank R --listen {host}:7001 --rendezvous HOST:7100 --tls-dir {target}"]
    return [*lines, f"  there: headrace gateway MODEL --replica NAME=HOST:7001 --tls-dir {target}"]


def _host(name: str) -> str:
    """Addresses with a port and scp need brackets around an IPv6 address."""
    return f"[{name}]" if ":" in name else name
