"""Compiles a model's grammars in two steps: each is vetted in another process, then compiled in this one. The trie of the vocabulary is
made once.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.grammar import Grammar
from headrace.engine.grammar.compiling import compile_grammar
from headrace.engine.grammar.vetting import GrammarVetter
from headrace.engine.grammar.vocabulary import TokenTrie

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarCompiler:
    """The grammars of one model. Nothing is read or started before the first one.

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
        """Vet a grammar. Returns the bytes that it will hold when compiled. Raises InvalidRequest, SequenceFailed, CheckpointError."""
        return self._vetter.vet(grammar)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the grammar's start. Called on a thread with a deep stack. Raises InvalidRequest, CheckpointError."""
        return compile_grammar(self._made_trie(), grammar)

    def close(self) -> None:
        """End the vetting process."""
        self._vetter.close()

    def _made_trie(self) -> TokenTrie:
        with self._making_trie:
            if self._trie is None:
                self._trie = TokenTrie(self._vetter.vocabulary())
            return self._trie
