"""Everything about text that a model folder holds, loaded together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model's text side: what a gateway or the offline API needs beside an engine."""

    tokenizer: Tokenizer
    template: ChatTemplate

    @property
    def digests(self) -> dict[str, str]:
        """Content digests for the wire's Hello: both ends must have read the same files. "" = the folder has none."""
        return {"tokenizer": self.tokenizer.digest, "template": self.template.digest}


def load_text(folder: str | Path) -> TextModel:
    """Tokenizer and template of a local model folder. Raises CheckpointError naming the file and the reason."""
    tokenizer = Tokenizer.load(folder)
    return TextModel(tokenizer, ChatTemplate.load(folder, tokenizer))
