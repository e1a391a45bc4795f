"""Finds or fetches the local folder of a model by its name: bundled, already here, made for a GGUF file, of a registry, or a hub id; of an
adapter bundled, here, or of a registry.

From a hub, only weights in safetensors and text files are fetched: no code.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from headrace.bundled import FOLDER, bundled_adapter, bundled_names, bundled_path
from headrace.core.errors import ConfigError
from headrace.machine.folders import expanded
from headrace.registry.names import is_reference, read_reference
from headrace.tensor.checkpoint.gguf.paths import is_first, is_gguf

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt")
NEVER_FETCHED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.py", "*.gguf", "*.onnx")


def resolve_model(name_or_path: str, *, experimental: bool = False, bundled: Path = FOLDER) -> Path:
    """A bundled name wins over a folder of the same name: write ./name for the folder.

    Raises ConfigError; CheckpointError for a GGUF file that is damaged or not supported, and for wrong bytes in a registry; RegistryFailed.
    """
    if not name_or_path or "\0" in name_or_path:
        raise ConfigError("model", f"{name_or_path!r} is not a name or a path")
    if (folder := bundled_path(name_or_path, bundled)) is not None:
        return folder
    if is_reference(name_or_path):
        return _pulled_once(name_or_path)
    path = expanded(name_or_path)
    if path.is_dir():
        return path.resolve()
    if path.is_file() and is_gguf(path):
        from headrace.tensor.checkpoint.gguf.folder import make_folder

        return make_folder(path)
    if path.exists():
        raise ConfigError("model", f"{name_or_path} is a file", "Give a .gguf file, or the folder that holds config.json and the weights.")
    if _is_path(name_or_path):
        raise ConfigError("model", f"there is no {'file' if is_gguf(name_or_path) else 'folder'} {name_or_path}", _known(bundled))
    if not experimental:
        reason = f"{name_or_path!r} is no folder here, and fetching from a hub has not been run where Headrace is tested"
        raise ConfigError(
            "model", reason, f"{_known(bundled, name_or_path)} To try the hub: headrace serve --experimental, or LLM(experimental=True)."
        )
    return _from_hub(name_or_path, bundled)


def resolve_adapter(name_or_path: str) -> Path:
    """A bundled name wins, as for models. Raises ConfigError, and for an adapter of a registry what `resolve_model` raises."""
    if (folder := bundled_adapter(name_or_path)) is not None:
        return folder
    if is_reference(name_or_path):
        return _from_registry(name_or_path)
    path = expanded(name_or_path)
    if not name_or_path or "\0" in name_or_path or not path.is_dir():
        raise ConfigError(
            "lora_path",
            f"there is no folder {name_or_path!r}",
            "Give a folder as PEFT saves it, or one in a registry, as s3://bucket/adapters/name:2.",
        )
    return path.resolve()


def name_elsewhere(name: str, folder: Path) -> str:
    """What names on another machine what this one has in `folder`, where a file says `name`. Of an alias, the version that is here.

    Raises RegistryFailed.
    """
    if bundled_path(name) is not None or bundled_adapter(name) is not None:
        return name
    if is_reference(name):
        from headrace.registry.cache import NodeCache

        version = NodeCache().version(folder)
        return name if version is None else str(replace(read_reference(name), tag=version))
    return str(expanded(name).resolve() if is_gguf(name) else folder)


def _is_path(name: str) -> bool:
    is_odd = name.startswith(("/", "~", ".")) or ".." in name or name.endswith("/") or is_gguf(name)
    return is_odd or HUB_ID.fullmatch(name) is None


def pulled_model(text: str) -> Path:
    """The folder of the version to which a name in a registry leads now. Raises as `resolve_model`."""
    folder = _from_registry(text)
    if (folder / "config.json").exists():
        return folder
    files = [path for path in sorted(folder.iterdir()) if is_gguf(path) and is_first(path)]
    if len(files) != 1:
        raise ConfigError("model", f"{text} has no config.json, and {len(files)} models in .gguf files", "Push one model's folder.")
    from headrace.tensor.checkpoint.gguf.folder import make_folder

    return make_folder(files[0])


_pulled_once = cache(pulled_model)
"""Keeps the version that an alias had first in this process."""


def _from_registry(text: str) -> Path:
    from headrace.registry.cache import NodeCache

    reference = read_reference(text)
    shown = 0

    def show(done: int, total: int) -> None:
        nonlocal shown
        if total and 10 * done // total > shown:
            shown = 10 * done // total
            log.info("%s: %d of %d MB pulled", reference, done // 1_000_000, total // 1_000_000)

    return NodeCache().pull(reference, show)


def _from_hub(name: str, bundled: Path) -> Path:
    # 0.3 s of import, needed only here.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        folder = snapshot_download(name, allow_patterns=list(ALLOWED_FILES), ignore_patterns=list(NEVER_FETCHED))
    except RepositoryNotFoundError as error:
        raise ConfigError("model", f"the hub has no public model {name!r}", _known(bundled)) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        remedy = f"Download it elsewhere and give the folder. {_known(bundled)}"
        raise ConfigError("model", f"{name!r} is no folder here, not in the hub's cache, and the hub cannot be reached", remedy) from error
    return Path(folder)


def _known(bundled: Path, name: str = "") -> str:
    names = bundled_names(bundled)
    near = get_close_matches(name, names, n=1)
    known = f"Bundled: {', '.join(names)}." if names else "Give the path of a model folder."
    return f"Did you mean {near[0]}? {known}" if near else known
