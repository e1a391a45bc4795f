"""Names a LoRA adapter and the folder that holds it."""

from __future__ import annotations

from dataclasses import dataclass

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
