"""Prepares the grammars of requests (a `Preparer`), on its own thread."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.grammar import Grammar
from headrace.core.ids import PreparationId
from headrace.core.request import EngineRequest
from headrace.engine.grammar.compiling import TokenTrie, compile_grammar
from headrace.engine.grammar.limits import MAX_WAITING_GRAMMARS, PREPARE_TIMEOUT_S, VET_CPU_S, start_deep_thread
from headrace.engine.grammar.store import GrammarKey, GrammarStore
from headrace.engine.grammar.vetting import GrammarVetter

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarCompiler:
    """Nothing is read or started before the first one.

    num_words  32-bit words of a mask
    refusal    why this model can have no grammar at all; "" where it can
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.num_words = -(-vocab_size // 32)
        self.refusal = ""
        if not (folder / "tokenizer.json").is_file():
            self.refusal = "the model's folder has no tokenizer.json"
        elif not eos_token_ids:
            self.refusal = "the model has no end token, so that no output could end"
        self._vetter = GrammarVetter(folder, vocab_size, eos_token_ids)
        self._making_trie = threading.Lock()
        self._trie: TokenTrie | None = None

    def vet(self, grammar: Grammar) -> int:
        """Returns the bytes held when compiled. Raises InvalidRequest, SequenceFailed, CheckpointError."""
        return self._vetter.vet(grammar)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Called on a thread with a deep stack. Raises InvalidRequest, CheckpointError."""
        return compile_grammar(self._made_trie(), grammar)

    def close(self) -> None:
        self._vetter.close()

    def _made_trie(self) -> TokenTrie:
        with self._making_trie:
            if self._trie is None:
                self._trie = TokenTrie(self._vetter.vocabulary())
            return self._trie


GRAMMAR = "grammar"

MAX_VETTED = 4096


class PreparedEngine(Protocol):
    def satisfied(self, preparation_id: PreparationId, what: str) -> None: ...

    def failed(self, preparation_id: PreparationId, what: str, error: Exception) -> None: ...


class GrammarPreparer:
    def __init__(self, compiler: GrammarCompiler, store: GrammarStore) -> None:
        self._compiler = compiler
        self._store = store
        self._engine: PreparedEngine | None = None
        self._jobs = TenantJobs()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._open: dict[PreparationId, GrammarKey] = {}
        self._pinned: set[PreparationId] = set()
        self._vetted: OrderedDict[bytes, int] = OrderedDict()

    def attach(self, engine: PreparedEngine) -> None:
        self._engine = engine

    # on the loop's thread

    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> Mapping[str, float]:
        if request.grammar is None:
            return {}
        if self._compiler.refusal:
            raise InvalidRequest("grammar", f"none: {self._compiler.refusal}", request.grammar.kind.value)
        key = GrammarKey(request.tenant, request.grammar)
        is_there = self._store.pin(key)
        if not is_there:
            self._jobs.check_room(key.tenant)
        with self._lock:
            self._open[preparation_id] = key
            if is_there:
                self._pinned.add(preparation_id)
        if is_there:
            return {}
        self._jobs.put(key.tenant, preparation_id)
        if self._thread is None:
            self._thread = start_deep_thread(self._work, "headrace-grammars")
        return {GRAMMAR: PREPARE_TIMEOUT_S}

    def end(self, preparation_id: PreparationId) -> None:
        with self._lock:
            key = self._open.pop(preparation_id, None)
            is_pinned = preparation_id in self._pinned
            self._pinned.discard(preparation_id)
        if key is not None and is_pinned:
            self._store.unpin(key)

    def close(self) -> None:
        self._jobs.close()
        self._compiler.close()

    # on its own thread

    def _work(self) -> None:
        while (preparation_id := self._jobs.take()) is not None:
            with self._lock:
                key = self._open.get(preparation_id)
            if key is None:
                continue  # the request ended while it waited
            assert self._engine is not None, "attach comes first"
            try:
                self._prepare(key)
            except Exception as error:  # the outermost border of this thread: the loop logs what is not ours
                self._engine.failed(preparation_id, GRAMMAR, error)
            else:
                self._hand_over(preparation_id, key)
                self._engine.satisfied(preparation_id, GRAMMAR)

    def _prepare(self, key: GrammarKey) -> None:
        if not self._store.pin(key):
            num_bytes = self._vet(key)
            self._store.add(key, self._compiler.compile(key.grammar), num_bytes)

    def _vet(self, key: GrammarKey) -> int:
        digest = blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest not in self._vetted:
            self._vetted[digest] = self._compiler.vet(key.grammar)
            if len(self._vetted) > MAX_VETTED:
                self._vetted.popitem(last=False)
        self._vetted.move_to_end(digest)
        return self._vetted[digest]

    def _hand_over(self, preparation_id: PreparationId, key: GrammarKey) -> None:
        with self._lock:
            is_open = preparation_id in self._open
            if is_open:
                self._pinned.add(preparation_id)
        if not is_open:
            self._store.unpin(key)


class TenantJobs:
    """Tenants take turns, first come, first served within a tenant. Two threads use the queue."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[PreparationId]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False

    def check_room(self, tenant: str) -> None:
        with self._changed:
            num_waiting = len(self._waiting.get(tenant, ()))
        if num_waiting >= MAX_WAITING_GRAMMARS:
            retry_after_s = num_waiting * VET_CPU_S
            raise Overloaded(f"{num_waiting} new grammars of this tenant wait to be compiled already", retry_after_s=retry_after_s)

    def put(self, tenant: str, preparation_id: PreparationId) -> None:
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(preparation_id)
            self._changed.notify()

    def take(self) -> PreparationId | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            tenant, preparation_ids = self._waiting.popitem(last=False)
            preparation_id = preparation_ids.popleft()
            if preparation_ids:
                self._waiting[tenant] = preparation_ids
            return preparation_id

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
