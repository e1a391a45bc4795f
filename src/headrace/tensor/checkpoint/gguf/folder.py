"""Makes a folder in the Hugging Face layout (config.json, tokenizer.json, ...) for a GGUF file, so that other code reads only one layout.

The weights stay in the GGUF file, which `note.json` names. The folder is in this user's private cache, is named by a hash of the GGUF
headers and paths, and appears only when complete. A `note.json` in any other folder is ignored, since a downloaded note could name any
file. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from headrace import __version__
from headrace.core.errors import CheckpointError, ConfigError
from headrace.machine.cache_folder import ENVIRONMENT, cache_root, open_private
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.files import read_json
from headrace.tensor.checkpoint.gguf.architectures import make_config
from headrace.tensor.checkpoint.gguf.paths import model_name
from headrace.tensor.checkpoint.gguf.shards import GgufModel, read_gguf
from headrace.tensor.checkpoint.gguf.tokenizer import make_text_files

FOLDER = "gguf"
NOTE = "note.json"
VERSION = 2
MAX_FOLDERS = 64
"""The one that was asked for longest ago is removed first."""
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class GgufSource(NamedTuple):
    """first: the model's first file; digest: of the headers that the folder was made from."""

    first: Path
    digest: str


def make_folder(file: Path) -> Path:
    """Raises CheckpointError for a file that is damaged or not supported; ConfigError where the folder cannot be kept."""
    file = file.absolute()
    model = read_gguf(file)
    try:
        directory = open_private(cache_root(os.environ).absolute(), (FOLDER,))
        paths = "\0".join(str(header.path) for header in model.headers)
        text = f"{VERSION}\0{__version__}\0{model.digest}\0{paths}"
        home = directory / blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        folder = home / model_name(file)
        if (folder / NOTE).is_file():
            os.utime(home)
            return folder
        _write(home, folder.name, model)
        _remove_oldest(directory)
    except OSError as error:
        remedy = f"Set {ENVIRONMENT} to a folder that this user alone may write to."
        raise ConfigError("model", f"the tokenizer of {file} cannot be kept on disk ({error})", remedy) from error
    return folder


def find_source(folder: Path) -> GgufSource:
    """Raises CheckpointError for a folder that `make_folder` did not make."""
    home, cache = folder.resolve().parent, cache_root(os.environ) / FOLDER
    try:
        is_ours = home.parent == open_private(cache_root(os.environ), (FOLDER,)).resolve()
    except OSError:
        is_ours = False
    if not is_ours:
        reason = f"says that the weights are a GGUF file, and the folder does not lie in {cache}, where such folders are made"
        remedy = f"Give the path of the .gguf file. If {ENVIRONMENT} was another one when the folder was made, set that one again."
        raise CheckpointError(str(folder / "config.json"), reason, remedy)
    note = ConfigFile(str(folder / NOTE), read_json(folder, NOTE))
    return GgufSource(Path(note.text("first")), note.text("digest"))


def _write(home: Path, name: str, model: GgufModel) -> None:
    """Raises CheckpointError, OSError."""
    config = make_config(model)
    text = make_text_files(model.keys, int(str(config["vocab_size"])))
    documents = dict(zip(_FILES, (config, text.generation, text.tokenizer, text.config), strict=True))
    note = {"first": str(model.headers[0].path), "digest": model.digest}
    unfinished = Path(tempfile.mkdtemp(dir=home.parent, suffix=".unfinished"))
    try:
        (unfinished / name).mkdir()
        for file, document in {**documents, NOTE: note}.items():
            is_note = file == NOTE  # a path may hold bytes that are no UTF-8
            (unfinished / name / file).write_text(json.dumps(document, ensure_ascii=is_note), encoding="utf-8")
        _appear(unfinished, home, name)
        if not (home / name / NOTE).is_file():
            raise OSError(f"{home} cannot be written")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _appear(unfinished: Path, home: Path, name: str) -> None:
    """Rename, in the place of a folder that is not complete. One that another start has just completed is left: it may be read already."""
    for _ in range(2):
        with suppress(OSError):
            unfinished.rename(home)
            return
        if (home / name / NOTE).is_file():
            return
        shutil.rmtree(home, ignore_errors=True)


def _remove_oldest(directory: Path) -> None:
    found = []
    for path in directory.iterdir():
        with suppress(OSError):  # another start has just removed it
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found, reverse=True)[MAX_FOLDERS:]:
        shutil.rmtree(path, ignore_errors=True)
