"""Tries each grammar in a fork of itself, within bounds: the vetting process, `python -m headrace.engine.grammar.vetting_host`.

The kernel bounds it: CPU and wall time by timers whose signals end C and Rust code too, memory by its address space.

Its standard input is one end of a socket pair; `vetting.GrammarVetter` has the other. A frame is four bytes of length and then JSON,
but for the vocabulary:

    from the engine   {"folder": ..., "vocab_size": ..., "eos_token_ids": [...]}   once
                      a grammar's fields
    to the engine     {"refused": {...}}, and this process ends, or {} and then the vocabulary, packed
                      {"num_bytes": n}, {"invalid": {...}} or {"signal": n}: how the fork ended
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from headrace.core.errors import CheckpointError, InvalidRequest
from headrace.core.grammar import Grammar
from headrace.engine.grammar.compiling import NAMES, GrammarVocabulary, TokenTrie, compile_grammar, one_line
from headrace.engine.grammar.limits import MAX_COMPILED_BYTES, NUM_VETTED_STEPS, VET_CPU_S, VET_MEMORY_BYTES, VET_STACK_BYTES, VET_WALL_S
from headrace.machine.resources import process_memory, trim_heap
from headrace.machine.standard_streams import prepare_standard_streams

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LENGTH = struct.Struct("<I")


class OtherEndGone(Exception):
    pass


def send_frame(channel: socket.socket, data: bytes) -> None:
    """Raises OtherEndGone, and TimeoutError where the socket has a time limit."""
    try:
        channel.sendall(_LENGTH.pack(len(data)) + data)
    except TimeoutError:
        raise
    except OSError as error:
        raise OtherEndGone from error


def receive_frame(channel: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return _exactly(channel, length)


def _exactly(channel: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        try:
            received = channel.recv_into(view)
        except TimeoutError:
            raise
        except OSError as error:
            raise OtherEndGone from error
        if not received:
            raise OtherEndGone
        view = view[received:]
    return bytes(data)


NO_EXTENSION = "NoExtensionBias"


def main() -> None:
    prepare_standard_streams()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's threads would not survive a fork
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C signals the whole process group; the engine decides when this process ends
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with suppress(OtherEndGone):
        serve(channel)


def serve(channel: socket.socket) -> None:
    config = json.loads(receive_frame(channel))
    try:
        vocabulary = GrammarVocabulary.load(config["folder"], config["vocab_size"], tuple(config["eos_token_ids"]))
        trie = TokenTrie(vocabulary)
    except CheckpointError as error:
        _say(channel, {"refused": {"file": error.file, "reason": error.reason, "remedy": error.remedy}})
        return
    _say(channel, {})
    send_frame(channel, vocabulary.packed())
    del vocabulary
    gc.collect()
    gc.freeze()
    while True:
        grammar = Grammar.from_fields(json.loads(receive_frame(channel)))
        _say(channel, vet_in_fork(trie, grammar))


def _say(channel: socket.socket, message: Mapping[str, object]) -> None:
    send_frame(channel, json.dumps(message).encode())


def vet_in_fork(trie: TokenTrie, grammar: Grammar) -> Mapping[str, object]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _vet_and_leave(trie, grammar, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) or not answer:
        return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}
    verdict: Mapping[str, object] = json.loads(answer)
    return verdict


def _vet_and_leave(trie: TokenTrie, grammar: Grammar, writer: int) -> NoReturn:
    try:
        _bind_this_process()
        try:
            answer: Mapping[str, object] = {"num_bytes": vet(trie, grammar)}
        except InvalidRequest as error:
            answer = {"invalid": {"limit": error.limit, "value": None if error.given is None else error.value, "remedy": error.remedy}}
        os.write(writer, json.dumps(answer).encode())
    except MemoryError:
        os.abort()  # the same end as that of native code out of memory
    finally:
        os._exit(0)


def _bind_this_process() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # an abort would print the client's text on stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_STACK, VET_STACK_BYTES)
    if own := process_memory().size:
        _limit(resource.RLIMIT_AS, own + VET_MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_REAL, VET_WALL_S)
    signal.setitimer(signal.ITIMER_PROF, VET_CPU_S)


def _limit(kind: int, num_bytes: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard), hard))


def vet(trie: TokenTrie, grammar: Grammar) -> int:
    """Bytes that the grammar holds after some use; 0 where the system does not report memory. Raises InvalidRequest."""
    before = process_memory().anonymous
    matcher = compile_grammar(trie, grammar)
    _try_masks(matcher, grammar)
    trim_heap()  # memory freed after compiling does not count for the grammar
    num_bytes = max(0, process_memory().anonymous - before)
    if num_bytes > MAX_COMPILED_BYTES:
        limit = f"{NAMES[grammar.kind]} that takes at most {MAX_COMPILED_BYTES >> 20} MiB once it is compiled"
        raise InvalidRequest("grammar", limit, f"{num_bytes >> 20} MiB", "Send a smaller one.")
    return num_bytes


def _try_masks(template: LLMatcher, grammar: Grammar) -> None:
    """Raises InvalidRequest if a mask exceeds its limits, or if the grammar allows no output at all."""
    draw, matcher = random.Random(0), template.deep_copy()
    for step in range(NUM_VETTED_STEPS):
        mask: bytes = matcher.compute_bitmask()
        token_id = None if matcher.is_error() else _drawn_bit(mask, draw)
        if step == 0 and (token_id is None or matcher.stop_reason() == NO_EXTENSION):
            raise InvalidRequest("grammar", f"{NAMES[grammar.kind]} that some text matches", remedy=_why_nothing_matches(matcher))
        if token_id is not None:
            matcher.consume_token(token_id)
        if matcher.is_error():
            limit = f"{NAMES[grammar.kind]} whose masks stay within their limits"
            raise InvalidRequest("grammar", limit, remedy=f"After {step} tokens: {one_line(matcher.get_error())}")
        if token_id is None or matcher.is_stopped():
            matcher = template.deep_copy()


def _why_nothing_matches(matcher: LLMatcher) -> str:
    reason = one_line(matcher.get_error())
    if NO_EXTENSION in (reason, matcher.stop_reason()):
        return "Nothing can be written that satisfies it: its parts exclude each other, or refer to each other without an end."
    return reason


def _drawn_bit(mask: bytes, draw: random.Random) -> int | None:
    begin: int = draw.randrange(len(mask))
    places: list[int] = [*range(begin, len(mask)), *range(begin)]
    for place in places:
        if mask[place]:
            bits = [bit for bit in range(8) if mask[place] >> bit & 1]
            return 8 * place + bits[draw.randrange(len(bits))]
    return None


if __name__ == "__main__":
    main()
