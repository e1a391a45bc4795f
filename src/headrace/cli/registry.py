"""`headrace registry push|pull|list|promote|remove|verify|gc`: versions of models in folders and object storage, and of OCI
registries to pull (docs/registry.md).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.admin.control import RunDir, command, open_deployment
from headrace.cli.admin.directory import AdminFiles, AdminUrl
from headrace.cli.exits import UsageRefused
from headrace.core.errors import CheckpointError, ConfigError
from headrace.registry.names import Reference

if TYPE_CHECKING:
    from headrace.registry.remote import Registry

registry_app = typer.Typer(
    help="Keep versions of models in a folder, in S3 or, which is untested, in GCS, and pull them, also from OCI registries.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

UNUSED_DAYS = 30

Model = Annotated[str, typer.Argument(metavar="REF", help="file://, s3://, gs:// or oci://ROOT/NAME[:TAG]; TAG is a version or an alias.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


@registry_app.command()
def push(folder: Annotated[Path, typer.Argument(help="A model's folder, or an adapter's as PEFT saves it.")], reference: Model) -> None:
    """Store what a folder holds as a new version, and point the alias `latest` to it. A version never changes."""
    from headrace.bundled import bundled_path
    from headrace.registry.remote import Registry

    if not (source := bundled_path(str(folder)) or folder).is_dir():
        raise ConfigError("folder", f"there is no folder {folder}")
    where = _read(reference)
    if ":" not in reference.rpartition("/")[2]:
        raise ConfigError("model", f"{reference} names no version", f"Write for example {where.registry}/{where.name}:1.")
    manifest, left_out = Registry(where.registry, may_make=True).push(source, where.name, where.tag, _progress)
    for name in left_out:
        print(f"left out: {name}", file=sys.stderr)
    print(f"{where}: {len(manifest.files)} files, {manifest.num_bytes} bytes")


@registry_app.command()
def pull(reference: Model) -> None:
    """Pull a version to this node, and print its folder. What is here already is not pulled again."""
    from headrace.registry.cache import NodeCache

    print(NodeCache().pull(_read(reference), _progress))


@registry_app.command("list")
def list_models(
    registry: Annotated[str, typer.Argument(help="The registry, or one model of it: SCHEME://ROOT[/NAME].")], as_json: AsJson = False
) -> None:
    """List models, their versions with what they are, and the aliases that point to them."""
    from headrace.registry.remote import Registry

    there, names = _model_of(registry) or (Registry(registry), [])
    names = names or there.names()
    if not names:
        raise ConfigError("registry", f"{registry} has no models", "Name a registry, or a model in one.")
    rows = []
    for name in names:
        aliases = there.aliases(name)
        for version in there.versions(name):
            manifest = there.find(name, version).manifest
            pointing = sorted(alias for alias, target in aliases.items() if target == version)
            row = {"name": name, "version": version, "aliases": ",".join(pointing), "bytes": str(manifest.num_bytes)}
            rows.append({**row, **manifest.facts})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        facts = [str(row[key]) for key in ("architecture", "precision", "format") if key in row]
        context = [f"context {row['context']}"] if "context" in row else []
        print("  ".join([f"{row['name']}:{row['version']}", row["aliases"] or "-", f"{row['bytes']} bytes", *facts, *context]))


@registry_app.command()
def promote(
    reference: Model,
    alias: Annotated[str, typer.Argument(help="For example stable, or canary.")],
    rollout: Annotated[
        str | None, typer.Option("--rollout", metavar="MODEL", help="First roll it out to this model of a running deployment.")
    ] = None,
    run_dir: RunDir = None,
    admin: AdminUrl = None,
    tls_dir: AdminFiles = None,
) -> None:
    """Point an alias to a version. What is served keeps its version until a rollout.

    With --rollout the alias is moved once the version has replaced all replicas; a version that is rolled back leaves it where it was.
    """
    from headrace.registry.remote import Registry

    where = _read(reference)
    registry = Registry(where.registry)
    version = registry.find(where.name, where.tag).manifest.version
    target = Reference(where.registry, where.name, alias)
    if rollout is None:
        if (run_dir, admin, tls_dir) != (None, None, None):
            raise UsageRefused("--run-dir, --admin and --tls-dir: are for --rollout MODEL.")
    else:
        registry.check_alias(where.name, alias)
        body = {"model": rollout, "alias": str(target), "version": str(Reference(where.registry, where.name, version))}
        if code := command(open_deployment(run_dir, admin, tls_dir), "rollout", body):
            print(f"headrace: {alias} was not moved", file=sys.stderr)
            raise typer.Exit(code)
    registry.set_alias(where.name, alias, version)
    print(f"{target} -> {version}")


@registry_app.command()
def remove(reference: Model) -> None:
    """Remove a version to which no alias points; gc deletes its bytes a day later. Its name is not used again."""
    from headrace.registry.remote import Registry

    where = _read(reference)
    Registry(where.registry).remove(where.name, where.tag)


@registry_app.command()
def verify(
    reference: Model,
    here: Annotated[bool, typer.Option("--here", help="This node's copy; the next pull brings a damaged one anew.")] = False,
) -> None:
    """Read all bytes of a version, and compare them with those that were pushed."""
    from headrace.registry.cache import NodeCache
    from headrace.registry.remote import Registry

    where = _read(reference)
    wrong = NodeCache().verify(where) if here else Registry(where.registry).check(where.name, where.tag)
    if wrong:
        raise CheckpointError(str(where), f"has other bytes than were pushed in {', '.join(wrong)}")
    print(f"{where}: every byte is as it was pushed")


@registry_app.command()
def gc(
    registry: Annotated[
        str | None, typer.Argument(help=f"A registry; default: this node's copies that were not used for {UNUSED_DAYS} days.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go from the registry.")] = False,
) -> None:
    """Delete the bytes of removed versions and of pushes that were not completed, or this node's copies that are not used."""
    from headrace.registry.cache import NodeCache
    from headrace.registry.remote import Registry

    if registry is None:
        if dry_run:
            raise ConfigError("--dry-run", "is for a registry", "Name one.")
        print(f"{NodeCache().free(UNUSED_DAYS * 86_400)} bytes freed")
        return
    collected = Registry(registry).collect(dry_run=dry_run)
    print(f"{collected.num_blobs} files, {collected.num_bytes} bytes {'would go' if dry_run else 'deleted'}")


def _model_of(text: str) -> tuple[Registry, list[str]] | None:
    """The registry and the name of a model; None: the text names none."""
    from headrace.registry.remote import Registry

    root, _, name = text.rstrip("/").rpartition("/")
    try:
        registry = Registry(root)
    except ConfigError:
        return None
    return (registry, [name]) if registry.versions(name) else None


def _read(text: str) -> Reference:
    from headrace.registry.names import read_reference

    return read_reference(text)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done // 1_000_000} of {total // 1_000_000} MB", end="\n" if done == total else "", file=sys.stderr, flush=True)
