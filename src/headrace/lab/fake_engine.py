"""Runs an engine process on the real wire with a FakeRunner in place of the model: `python -m headrace.lab.fake_engine --config FILE`.

The file is an engine's plus a section "fake" with FakeOptions. For tests and load measurements; no `headrace` command starts it.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode, read_json_object
from headrace.engine.config import EngineConfig
from headrace.engine.server.adapter_reload import adapters_of
from headrace.engine.server.config import ProcessConfig, section
from headrace.engine.server.process import EngineExitCode, leave, run_process
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.machine.standard_streams import prepare_standard_streams
from headrace.observe.logs import set_up_logging
from headrace.wire.leash import Leash


def load_fake_config(path: str | Path) -> tuple[ProcessConfig, EngineConfig, FakeOptions]:
    data = read_json_object(path)
    options = decode(FakeOptions, section(data, "fake") if "fake" in data else {}, "fake")
    engine = decode(EngineConfig, section(data, "engine"), "engine").checked()
    return decode(ProcessConfig, data), engine, options


def main(arguments: list[str] | None = None) -> None:
    prepare_standard_streams()
    parser = argparse.ArgumentParser(prog="python -m headrace.lab.fake_engine", description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--parent-fd", type=int)
    given = parser.parse_args(arguments)
    set_up_logging()
    leash = Leash(given.parent_fd)
    try:
        process, engine, options = load_fake_config(given.config)
    except ConfigError as error:
        leash.failed(str(error), can_retry=False)
        print(f"fake engine: {error}", file=sys.stderr)
        leave(EngineExitCode.REFUSED)
        return

    def read_again() -> tuple[ProcessConfig, EngineConfig]:
        return load_fake_config(given.config)[:2]

    read_adapters = partial(adapters_of, read_again, (process, engine))
    leave(run_process(lambda outbox: fake_engine(outbox, options, engine, block_key=process.block_key), process, leash, read_adapters))


if __name__ == "__main__":
    main()
