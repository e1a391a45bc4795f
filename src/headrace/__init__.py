"""Headrace: weights plus whatever hardware there is, served as a fast, fair, observable, OpenAI-compatible token API.

Importing this package pulls nothing in (PEP 562): the names below are loaded when first used. Read docs/architecture.md next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "headrace.llm",
    "LoRARequest": "headrace.llm",
    "SamplingParams": "headrace.core.sampling",
    "StructuredOutputsParams": "headrace.core.structured",
}

if TYPE_CHECKING:
    from headrace.core.sampling import SamplingParams as SamplingParams
    from headrace.core.structured import StructuredOutputsParams as StructuredOutputsParams
    from headrace.llm import LLM as LLM
    from headrace.llm import LoRARequest as LoRARequest


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
