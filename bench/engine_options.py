"""Gives the command lines of benchmarks engine options, made from `EngineConfig` as the flags of `headrace` are (`cli.flags.rows`)."""

from __future__ import annotations

import argparse

from headrace.cli.flags.rows import ENGINE_FLAGS
from headrace.engine.config import EngineConfig
from headrace.fleet.weights import resolve_model


def add_engine_options(parser: argparse.ArgumentParser, *fields: str, **defaults: object) -> None:
    """Give `parser` the flags of these fields of `EngineConfig`, and of the fields in `defaults`, whose default here is another one.

    Only for options that take a value.
    """
    wanted = (*fields, *defaults)
    for flag in ENGINE_FLAGS:
        if flag.field in wanted:
            default = defaults.get(flag.field, flag.option.default)
            choices = flag.option.one_of or None
            help_text = f"{flag.option.help} (default: {defaults.get(flag.field, flag.option.shown_default)})".replace("%", "%%")
            parser.add_argument(*flag.names, dest=flag.field, type=flag.kind, choices=choices, default=default, help=help_text)
    parser.set_defaults(engine_fields=wanted)


def engine_config(model: str, given: argparse.Namespace) -> EngineConfig:
    """The configuration that a command line asks for. Raises ConfigError."""
    options = {field: getattr(given, field) for field in given.engine_fields}
    return EngineConfig(model=str(resolve_model(model)), **options).checked()
