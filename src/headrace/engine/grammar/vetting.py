"""Has each grammar tried in a vetting process (`vetting_host`) before the engine compiles it: the engine's end of that process.

The process is started at the first grammar and kept. Any thread may call; one grammar is vetted at a time.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError, InvalidRequest, SequenceFailed, ShownValue
from headrace.core.grammar import Grammar
from headrace.engine.grammar.compiling import NAMES, GrammarVocabulary
from headrace.engine.grammar.limits import VET_CPU_S, VET_MEMORY_BYTES, VET_STACK_BYTES, VET_WALL_S
from headrace.engine.grammar.vetting_host import OtherEndGone, receive_frame, send_frame

START_TIMEOUT_S = 60.0

ANSWER_TIMEOUT_S = VET_WALL_S + 3.0

NUM_ATTEMPTS = 2


class GrammarVetter:
    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._config = {"folder": str(folder), "vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids)}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._vocabulary = b""
        self._closed = False
        self._lock = threading.Lock()

    def vocabulary(self) -> GrammarVocabulary:
        with self._lock:
            self._started()
            return GrammarVocabulary.unpacked(self._vocabulary)

    def vet(self, grammar: Grammar) -> int:
        """Returns the bytes held when compiled. Raises InvalidRequest, CheckpointError and SequenceFailed."""
        with self._lock:
            for _ in range(NUM_ATTEMPTS):
                try:
                    return _num_bytes(grammar, self._ask(grammar))
                except OtherEndGone:
                    self._end_process()
                except TimeoutError:
                    self._end_process()
                    raise _over_budget(grammar, signal.SIGALRM) from None
        raise SequenceFailed("the grammar could not be vetted: the process that does it has ended")

    def close(self) -> None:
        self._closed = True
        if (channel := self._channel) is not None:
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer, even while a fork holds the other end open
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end_process()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()

    def _ask(self, grammar: Grammar) -> Mapping[str, Any]:
        channel = self._started()
        send_frame(channel, json.dumps(asdict(grammar)).encode())
        answer: Mapping[str, Any] = json.loads(receive_frame(channel))
        return answer

    def _started(self) -> socket.socket:
        if self._closed:
            raise SequenceFailed("the engine is ending")
        if self._channel is None:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "headrace.engine.grammar.vetting_host"]
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
            self._channel = ours
            self._read_vocabulary(ours)
        return self._channel

    def _read_vocabulary(self, channel: socket.socket) -> None:
        channel.settimeout(START_TIMEOUT_S)
        try:
            send_frame(channel, json.dumps(self._config).encode())
            head = json.loads(receive_frame(channel))
            if refused := head.get("refused"):
                raise CheckpointError(refused["file"], refused["reason"], refused["remedy"])
            self._vocabulary = receive_frame(channel)
        except BaseException as error:
            self._end_process()
            if isinstance(error, TimeoutError):
                raise CheckpointError("tokenizer.json", f"was not read within {START_TIMEOUT_S:g} s") from None
            raise
        channel.settimeout(ANSWER_TIMEOUT_S)


def _num_bytes(grammar: Grammar, answer: Mapping[str, Any]) -> int:
    if invalid := answer.get("invalid"):
        value = None if invalid["value"] is None else ShownValue(invalid["value"])
        raise InvalidRequest("grammar", invalid["limit"], value, invalid["remedy"])
    if "signal" in answer:
        raise _over_budget(grammar, answer["signal"])
    return int(answer["num_bytes"])


def _over_budget(grammar: Grammar, number: int) -> InvalidRequest:
    timed = {int(signal.SIGPROF): f"{VET_CPU_S * 1000:g} ms of CPU time", int(signal.SIGALRM): f"{VET_WALL_S:g} s"}
    budget = timed.get(number, f"{VET_MEMORY_BYTES >> 20} MiB of memory and {VET_STACK_BYTES >> 20} MiB of stack")
    limit = f"{NAMES[grammar.kind]} that can be compiled within {budget}"
    return InvalidRequest("grammar", limit, remedy="Send a smaller or simpler one.")
