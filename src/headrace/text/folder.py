"""Loads everything about text that a model folder holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import CheckpointError, shorten
from headrace.core.model_info import TEXT_FILES, text_digests
from headrace.text.files import read_bytes, read_optional_object
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """digests: an engine must have read the same files"""

    tokenizer: Tokenizer
    template: ChatTemplate
    digests: dict[str, str] = field(default_factory=dict)


def load_text(folder: str | Path) -> TextModel:
    """Raises CheckpointError naming the file and the reason."""
    path = Path(folder)
    tokenizer = Tokenizer.load(path)
    _check_vocabulary(path, tokenizer)
    return TextModel(tokenizer, ChatTemplate.load(path, tokenizer), digests_of(path))


def digests_of(folder: Path) -> dict[str, str]:
    """Equal where two folders give the same tokens and prompts. Raises CheckpointError"""
    names = [name for names in TEXT_FILES.values() for name in names if (folder / name).is_file()]
    return text_digests({name: read_bytes(folder / name) for name in names})


def _check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError if a text can be given an id without a row in the embedding table."""
    limit = read_optional_object(folder / "config.json").get("vocab_size")
    if isinstance(limit, bool) or not isinstance(limit, int):
        return
    if (beyond := tokenizer.first_id_beyond(limit)) is not None:
        token, token_id = beyond
        raise CheckpointError(
            "tokenizer.json",
            f"token {shorten(token)} has id {token_id}, and config.json's vocab_size = {limit} ends at {limit - 1}",
            "Tokenizer and model belong to different models, or the embeddings were not resized: fetch both from one place.",
        )
