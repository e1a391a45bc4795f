"""Names a LoRA adapter and the folder that holds it, and checks that one which was loaded at run time is where it may be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.model_names import check_free_name

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

MAX_ADAPTERS = 4096
"""An engine has at most this many: it sends all names after each change."""

MAX_UNANSWERED = 8
"""Folders whose file system has not answered in time, and whose reads are left behind: once there are this many, no folder is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """path         a folder with `ADAPTER_FILES`, as PEFT saves it
    root         loaded at run time: the folder below which it must be whenever it is read; None: anywhere, as the configuration says
    is_optional  loaded at run time: its folder may be gone since, and an engine that cannot use it leaves it out with a log line
    """

    name: str
    path: str
    root: str | None = None
    is_optional: bool = False


def check_adapters(sources: Sequence[AdapterSource]) -> None:
    """Raises ConfigError for a name that is invalid or taken, and for too many."""
    if len(sources) > MAX_ADAPTERS:
        raise ConfigError("lora_modules", f"has {len(sources)} adapters, more than {MAX_ADAPTERS}")
    names: set[str] = set()
    for index, source in enumerate(sources):
        check_free_name(f"lora_modules[{index}].name", source.name, names)


def resolve_below(root: str | Path, path: str) -> Path:
    """The folder of an adapter, links followed; a relative path begins at `root`. Nothing is opened. May block.

    Raises ConfigError unless the folder and each of its files that is there are below `root`, and OSError or ValueError for a path that
    cannot be resolved.
    """
    home, found = os.path.realpath(root), os.path.realpath(os.path.join(root, path))
    for each in (found, *(os.path.realpath(os.path.join(found, file)) for file in ADAPTER_FILES)):
        if each == home or not Path(each).is_relative_to(home):
            what = repr(path) if each == found else f"a file of {path!r}"
            raise ConfigError("PATH", f"{what} is not below lora_root ({root})", "Copy the adapter's folder there, with its files.")
    return Path(found)
