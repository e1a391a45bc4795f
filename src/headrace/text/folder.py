"""Everything about text that a model folder holds, loaded together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.digests import TEXT_FILES, text_digests
from headrace.text.files import read_bytes
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model's text side: what a gateway or the offline API needs beside an engine.

    digests  content digests for the wire's Hello (see `core.digests`): both ends must have read the same files
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    digests: dict[str, str] = field(default_factory=dict)


def load_text(folder: str | Path) -> TextModel:
    """Tokenizer and template of a local model folder. Raises CheckpointError naming the file and the reason."""
    path = Path(folder)
    tokenizer = Tokenizer.load(path)
    names = [name for names in TEXT_FILES.values() for name in names if (path / name).is_file()]
    return TextModel(tokenizer, ChatTemplate.load(path, tokenizer), text_digests({name: read_bytes(path / name) for name in names}))
