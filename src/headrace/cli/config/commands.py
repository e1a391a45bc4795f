"""`headrace config check|show|init|import`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.exits import CommandExitCode
from headrace.cli.flags.flag import NO_FLAGS, GivenFlags
from headrace.core.errors import ConfigError, counted
from headrace.core.strict_decode import joined, key_of
from headrace.engine.config import FindGpus
from headrace.machine.gpus import find_gpus
from headrace.policy.limits.tier import BUILT_IN_TIERS
from headrace.policy.queues import QUEUES

if TYPE_CHECKING:
    from headrace.cli.config.sections import ServeConfig

config_app = typer.Typer(help="Check, show, begin or import a configuration file.", no_args_is_help=True, rich_markup_mode=None)

TEMPLATE = """\
# Headrace: what `headrace serve --config FILE` starts. Every option: docs/config.md. Check it: headrace config check FILE
# Environment variables win over this file (HEADRACE_GATEWAY__PORT=9000), flags win over both.

models:
  - replicas: 1                       # engine processes
    # name: my-model                  # what clients ask for; default: the folder's name
    engine:
      model: {model}                  # a folder, the name of a bundled model or, with experimental, a hub id
      # max_model_len: 4096           # shorter contexts leave room for more sequences
      # max_num_seqs: 64              # sequences computed in one step
      # memory_fraction: 0.5          # share of the available memory for weights and KV cache
      # queue_policy: priority        # {queue_policies}
  # - name: elsewhere                 # a model that other OpenAI-compatible servers answer for
  #   upstreams: [{{url: "http://127.0.0.1:9000/v1", model: its-name-there, api_key_env: ITS_KEY}}]
  #   # beside `engine`, upstreams answer what no replica takes
  # - name: big                       # a model whose engines run on other machines (headrace engine, headrace tls init)
  #   remote: {{model: {model}, tls_dir: /etc/headrace/gateway, replicas: [{{name: gpu1, address: "gpu1:7001"}}]}}

gateway:
  host: 127.0.0.1                     # beyond loopback wants api_keys
  port: 8000
  # api_keys:                         # none: every program on this machine may use it
  #   - sha256: "{digest}"
  #     tenant: acme                  # opaque: fairness, cache separation, log
  #     tier: standard                # {tiers}, or a name of the section tiers
"""
_EXAMPLE_DIGEST = "<hex digest of the key: printf %s KEY | sha256sum>"


@config_app.command()
def check(file: Annotated[Path, typer.Argument(help="YAML file.")]) -> None:
    """Read a file (and the environment) as `serve` would, and print whether it is valid, or every fault with its line."""
    config = load_to_start(file, NO_FLAGS, find_gpus)
    _check_keys(config)
    replicas = sum(model.num_replicas for model in config.models)
    names = ", ".join(model.served_name for model in config.models)
    models, engines = counted(len(config.models), "model"), "up to " * config.has_pods + counted(replicas, "replica")
    print(f"{file}: ok. {models} ({names}), {engines}, {config.gateway.host}:{config.gateway.port}")


def load_to_start(file: Path | None, flags: GivenFlags, find: FindGpus) -> ServeConfig:
    """As `config.load`. Variables that nothing reads are named on stderr. Raises ConfigError, and typer.Exit where all faults of a file
    were printed."""
    from headrace.cli.config.faults import faults, unread_variables
    from headrace.cli.config.load import load

    for line in unread_variables(os.environ):
        print(f"headrace: {line}", file=sys.stderr)
    try:
        return load(file, os.environ, flags, find)
    except ConfigError as error:
        if file is None or error.where in flags.names.values() or not (all_faults := faults(file, os.environ, find)):
            raise
        for fault in all_faults:
            print(fault.message(file), file=sys.stderr)
        print(f"headrace: {file}: {counted(len(all_faults), 'fault')}", file=sys.stderr)
        raise typer.Exit(CommandExitCode.CONFIG) from None


def _check_keys(config: ServeConfig) -> None:
    from headrace.gateway.upstream.foreign.session import read_key

    for number, model in enumerate(config.models):
        for place, upstream in enumerate(model.upstreams):
            try:
                read_key(upstream)
            except ConfigError as error:
                raise error.at(f"models[{number}].upstreams[{place}].{error.where}") from None


@config_app.command()
def show(file: Annotated[Path | None, typer.Argument(help="YAML file; default: the bundled model.")] = None) -> None:
    """Print the whole configuration as `serve` would use it, defaults included and keys hidden."""
    from headrace.cli.config.load import load
    from headrace.cli.config.yaml_files import dump_yaml

    print(dump_yaml(shown(load(file, os.environ))), end="")


def begun_file(model: str, digest: str) -> str:
    return TEMPLATE.format(model=model, digest=digest, queue_policies=" | ".join(QUEUES), tiers=" | ".join(BUILT_IN_TIERS))


@config_app.command()
def init(file: Annotated[Path | None, typer.Argument(help="Where to write it; default: standard output.")] = None) -> None:
    """Begin a configuration file with the options that are changed most often."""
    text = begun_file(DEFAULT_MODEL, _EXAMPLE_DIGEST)
    _write(text, file)
    if file is not None:
        print(f"{file}: written. Next: headrace serve --config {file}")


def _write(text: str, file: Path | None) -> None:
    """file: None: standard output. Raises ConfigError for one that exists or cannot be written."""
    if file is None:
        print(text, end="")
        return
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(str(file), f"cannot be written ({error.strerror})", "An existing file is left alone.") from error


@config_app.command("import")
def import_litellm(
    file: Annotated[Path, typer.Argument(help="The config.yaml of a LiteLLM proxy.")],
    output: Annotated[Path | None, typer.Option(help="Where to write it; default: standard output.")] = None,
) -> None:
    """Make a configuration of a LiteLLM proxy's. Keys that are not mapped are listed on stderr and at its end, with what to do."""
    from headrace.cli.config.litellm import imported
    from headrace.cli.config.load import from_raw
    from headrace.cli.config.yaml_files import dump_yaml, mapping_of, parse_yaml, read_yaml

    config, missed = imported(read_yaml(file))
    notes = [str(note).encode("unicode_escape").decode("ascii") for note in missed]  # a key may hold the end of a line
    for note in notes:
        print(f"headrace: {note}", file=sys.stderr)
    if not config["models"]:
        raise ConfigError(str(file), "names no model that could be imported", "The lines above say why.")
    text = dump_yaml(config) + "".join(f"# {note}\n" for note in ["Not mapped:", *notes] if notes)
    try:
        from_raw(mapping_of(parse_yaml(text, str(file)), file))
    except ConfigError as error:
        raise error.at(f"{file}: imported, {error.where}") from error
    _write(text, output)
    if output is not None:
        print(f"{output}: written. Next: headrace config check {output}")  # which looks for the keys' variables and files too


def shown(value: object, where: str = "") -> object:
    """The keys that a file may have, as plain data. Fields without repr are secrets: they are hidden, except for the first characters of
    a digest. where: path of `value`"""
    from headrace.cli.config.load import INSTEAD

    if is_dataclass(value):
        plain: dict[str, object] = {}
        for item in fields(value):
            inner, path = getattr(value, item.name), joined(where, item.name)
            if not item.repr and isinstance(inner, str):
                inner = f"{inner[:8]}..." if inner and item.name == "sha256" else "(hidden)" if inner else ""
            if path not in INSTEAD:
                plain[key_of(item.name)] = shown(inner, path)
        return plain
    if isinstance(value, Mapping):
        return {name: shown(item) for name, item in value.items()}
    return [shown(item, f"{where}[N]") for item in value] if isinstance(value, tuple | list) else value
