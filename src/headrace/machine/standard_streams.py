"""Standard input, output and error of a process: open from its first moment, and harmless when they cannot be written.

A daemon may be started with descriptor 0, 1 or 2 closed, and its number goes to the next socket or file. Whatever is then
printed goes there: log lines into a client's connection. So every process calls `prepare_standard_streams`
before it opens anything.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

from headrace.core.errors import HeadraceError


class OutputLost(HeadraceError):
    """The disk is full, or the reader has left."""

    def __init__(self, error: OSError) -> None:
        self.reader_left = error.errno == errno.EPIPE
        super().__init__(f"standard output cannot be written ({error.strerror})")


def prepare_standard_streams() -> None:
    """Open /dev/null in the place of each standard descriptor that is closed, and make sys.stdout and sys.stderr safe to write.

    A print to stdout that fails raises OutputLost once; what follows is discarded, as is a print to stderr that fails. Streams that a
    caller has put in their place stay.
    """
    open_standard_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # open as long as the process
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Output(1), sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Diagnostics(2), sys.stderr)
        sys.__stderr__ = sys.stderr  # type: ignore[misc,assignment]  # the log's own line of last resort goes there


def open_standard_descriptors() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            if opened == descriptor:
                os.set_inheritable(descriptor, True)
            else:  # another thread was faster, and the number is its own now
                os.close(opened)


def _text(raw: io.RawIOBase, replaced: TextIO | None) -> TextIO:
    """Buffered and encoded as the stream in whose place it comes; a character without an encoding becomes an escape."""
    buffered = io.BufferedWriter(raw)
    if not isinstance(replaced, io.TextIOWrapper):  # None: the descriptor was closed when the interpreter started
        return io.TextIOWrapper(buffered, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    errors = "backslashreplace" if replaced.errors == "strict" else replaced.errors
    by_line = replaced.line_buffering or replaced.write_through
    return io.TextIOWrapper(buffered, encoding=replaced.encoding, errors=errors, line_buffering=by_line)


class _Descriptor(io.RawIOBase):
    """Writes to a descriptor, which stays open. Raises OSError, also where a non-blocking pipe is full."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return os.write(self._descriptor, data)


class _Output(_Descriptor):
    _is_lost = False

    def write(self, data: Any, /) -> int:
        if self._is_lost:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self._is_lost = True
            raise OutputLost(error) from error


class _Diagnostics(_Descriptor):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes
