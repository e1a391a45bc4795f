"""Loads adapters for a fake runner: a folder's bytes decide its tokens, and no tensor is made."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from headrace.core.errors import CheckpointError

FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class FakeAdapter:
    digest: str
    num_bytes: int


class FakeAdapterLoader:
    """Any bytes in the two files of a PEFT folder are an adapter."""

    max_bytes = 1 << 20

    def inspect(self, folder: Path) -> str:
        """Returns the digest, hex. Raises CheckpointError."""
        state = blake2b(digest_size=32)
        for name in FILES:
            try:
                state.update((folder / name).read_bytes())
            except OSError as error:
                raise CheckpointError(str(folder / name), f"cannot be read: {error.strerror}") from error
        return state.hexdigest()

    def load(self, folder: Path, digest: str) -> FakeAdapter:
        """Raises CheckpointError, also where the folder has another digest by now."""
        if self.inspect(folder) != digest:
            raise CheckpointError(str(folder), "its files have changed since they were inspected")
        return FakeAdapter(digest, (folder / FILES[1]).stat().st_size)


def save_fake_adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILES[0]).write_text("{}", encoding="ascii")
    (folder / FILES[1]).write_bytes(weights)
    return folder
