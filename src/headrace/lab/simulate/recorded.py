"""Makes a trace, as `load.read_trace` reads it, from a gateway's request log.

The trace says when requests came, how long they were, and with `log_prompt_blocks` which prompts begin alike. The log's hashes become
numbers in the order of the trace, so that no guessed prompt can be compared with it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import ConfigError
from headrace.core.hashing import RECORDED_BLOCK_TOKENS, RECORDED_HASH_CHARS
from headrace.lab.simulate.load import MAX_LINE_BYTES

MAX_ENTRIES = 1 << 22
"""Requests and blocks of a trace: half a gigabyte."""


class LoggedSequence(NamedTuple):
    """blocks: the numbers of the hashes of its prompt's first blocks"""

    time_ms: int
    prompt_tokens: int
    output_tokens: int
    blocks: array[int]


class RecordedTrace:
    """The sequences of a log that can be replayed.

    num_left_out  requests of the model without a generated token, of several prompts, or that continue a stream
    """

    def __init__(self, model: str | None) -> None:
        """model: whose requests are read; None: the log has those of one alone"""
        self.sequences: list[LoggedSequence] = []
        self.num_left_out = 0
        self._asked = model
        self._model = model
        self._numbers: dict[str, int] = {}
        self._num_entries = 0

    def read(self, file: Path) -> None:
        """A last line that is still being written is not read. Raises ConfigError."""
        try:
            stream = file.open("rb")
        except OSError as error:
            raise ConfigError(str(file), f"cannot be read ({error.strerror})") from None
        with stream:
            number = 1
            while (line := stream.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                self._add(line, f"{file}, line {number}")
                number += 1
            if len(line) == MAX_LINE_BYTES:
                raise ConfigError(f"{file}, line {number}", f"is longer than {MAX_LINE_BYTES} bytes")

    def trace_lines(self) -> Iterator[str]:
        """Sorted by time, which begins at 0."""
        ordered = sorted(self.sequences, key=lambda sequence: sequence.time_ms)
        shown: dict[int, int] = {}
        for each in ordered:
            entry: dict[str, object] = {"timestamp": each.time_ms - ordered[0].time_ms}
            entry |= {"input_length": each.prompt_tokens, "output_length": each.output_tokens}
            if each.blocks:
                entry |= {"hash_ids": [shown.setdefault(block, len(shown)) for block in each.blocks], "block_size": RECORDED_BLOCK_TOKENS}
            yield json.dumps(entry)

    def _add(self, line: bytes, where: str) -> None:
        try:
            entry = json.loads(line)
            time_ms = round(datetime.fromisoformat(entry["time"]).timestamp() * 1000)
            model, n = entry.get("model"), entry.get("n") or 1
            num_prompt, num_output = entry.get("prompt_tokens") or 0, (entry.get("completion_tokens") or 0) // n
            has_more_prompts = len(entry.get("finish_reasons") or ()) > n
            hashes = entry.get("prompt_blocks") or ""
            parts = [hashes[begin : begin + RECORDED_HASH_CHARS] for begin in range(0, len(hashes), RECORDED_HASH_CHARS)]
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise ConfigError(where, "is no line of a request log in JSON", "Give the file of `--request-log`.") from None
        if model is None or (self._asked is not None and model != self._asked):
            return
        self._model = self._model or model
        if model != self._model:
            raise ConfigError(where, f"is of the model {model}, earlier ones are of {self._model}", "Give --model.")
        if not num_prompt or not num_output or has_more_prompts or not {"continued_id", "estimated_tokens"}.isdisjoint(entry):
            self.num_left_out += 1
            return
        self._num_entries += n + len(parts)
        if self._num_entries > MAX_ENTRIES:
            raise ConfigError(where, f"is beyond {MAX_ENTRIES:,} requests and blocks", "Give a part of the log.")
        blocks = array("i", [self._numbers.setdefault(part, len(self._numbers)) for part in parts])
        self.sequences += [LoggedSequence(time_ms, num_prompt, num_output, blocks)] * n
