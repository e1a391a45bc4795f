"""Runs a model offline, without a server: `from headrace import LLM, SamplingParams`, with vLLM's names.

There is no thread or socket: the engine's loop runs in the calling thread.
"""

from __future__ import annotations

from headrace.core.sampling import SamplingParams
from headrace.core.structured import StructuredOutputsParams
from headrace.llm.adapters import LoRARequest
from headrace.llm.api import LLM
from headrace.llm.outputs import CompletionOutput, GenerationFailed, Logprob, RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "GenerationFailed",
    "LoRARequest",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
