"""The exit codes of all commands.

0    done; also after SIGTERM or Ctrl-C, once running streams have finished
1    a check or a run failed: doctor found a fault, a benchmark finished no request, a server died
2    the command line is wrong: unknown command or flag, a value out of range, a flag that is refused
3    the configuration or the weights are refused
4    a server could not be reached, or refused the request
75   `serve`: draining was cut short, by a second signal or the end of its time (`fleet.supervisor` has this one)
130  interrupted (Ctrl-C)
"""

from __future__ import annotations

import sys
from enum import IntEnum

from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, InvalidRequest, RegistryFailed
from headrace.machine.standard_streams import OutputLost


class CommandExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    CONFIG = 3
    SERVER = 4
    INTERRUPTED = 130


class UsageRefused(HeadraceError):
    """A flag of another server is not supported here, or flags contradict each other. The message says what to do."""


class ServerFailed(HeadraceError):
    """A server could not be reached, or answered with an error."""


CODES: tuple[tuple[type[HeadraceError], CommandExitCode], ...] = (
    (UsageRefused, CommandExitCode.USAGE),
    (InvalidRequest, CommandExitCode.USAGE),
    (ConfigError, CommandExitCode.CONFIG),
    (CheckpointError, CommandExitCode.CONFIG),
    (ServerFailed, CommandExitCode.SERVER),
    (RegistryFailed, CommandExitCode.SERVER),
)


def exit_code_of(error: HeadraceError) -> CommandExitCode:
    return next((code for kind, code in CODES if isinstance(error, kind)), CommandExitCode.FAILED)


def report(error: HeadraceError) -> CommandExitCode:
    """Print the error as one line on stderr, but for a reader of stdout that has left, as `head` does."""
    if not (isinstance(error, OutputLost) and error.reader_left):
        print(f"headrace: {error}", file=sys.stderr)
    return exit_code_of(error)
