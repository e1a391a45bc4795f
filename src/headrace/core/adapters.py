"""Names a LoRA adapter and the folder that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.model_names import check_free_name

MAX_ADAPTERS = 4096
"""An engine has at most this many: it sends all names after each change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """path         a folder with adapter_config.json and adapter_model.safetensors, as PEFT saves it
    is_optional  loaded at run time: its folder may be gone since, and an engine that cannot use it leaves it out with a log line
    """

    name: str
    path: str
    is_optional: bool = False


def check_adapters(sources: Sequence[AdapterSource]) -> None:
    """Raises ConfigError for a name that is invalid or taken, and for too many."""
    if len(sources) > MAX_ADAPTERS:
        raise ConfigError("lora_modules", f"has {len(sources)} adapters, more than {MAX_ADAPTERS}")
    names: set[str] = set()
    for index, source in enumerate(sources):
        check_free_name(f"lora_modules[{index}].name", source.name, names)
