"""`headrace adapters load|unload|list` changes the LoRA adapters of a deployment that runs (docs/control.md#adapters)."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.admin.control import RunDir, command, open_deployment
from headrace.cli.admin.directory import AdminFiles, AdminUrl, AsJson
from headrace.cli.admin.keys import print_rows

adapters_app = typer.Typer(help="Load, unload and list adapters while a deployment runs.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What clients ask for as model.")]
Model = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Its base model. Default: the only one with adapters.")]


@adapters_app.command()
def load(
    name: Name,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A folder below lora_root, on the deployment's machine; relative to it.")],
    model: Model = None,
    run_dir: RunDir = None,
    admin: AdminUrl = None,
    tls_dir: AdminFiles = None,
) -> None:
    """Load an adapter into every replica of its model, or load it again from a folder that has changed. It is kept over restarts."""
    raise typer.Exit(command(open_deployment(run_dir, admin, tls_dir), "load-adapter", {"name": name, "path": path, "model": model}))


@adapters_app.command()
def unload(name: Name, model: Model = None, run_dir: RunDir = None, admin: AdminUrl = None, tls_dir: AdminFiles = None) -> None:
    """Unload an adapter; requests that run with it end as they would. One of the configuration comes back with the next reload."""
    raise typer.Exit(command(open_deployment(run_dir, admin, tls_dir), "unload-adapter", {"name": name, "model": model}))


@adapters_app.command("list")
def list_adapters(as_json: AsJson = False, run_dir: RunDir = None, admin: AdminUrl = None, tls_dir: AdminFiles = None) -> None:
    """List the adapters of all models: where each is from, the digest of its files, and why one is not served."""
    rows = open_deployment(run_dir, admin, tls_dir).adapters()
    if not as_json:
        rows = [{**row, "digest": (row["digest"] or "")[:12]} for row in rows]
    print_rows(rows, ("name", "model", "origin", "path", "digest", "state"), as_json)
