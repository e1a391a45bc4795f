"""The offline API: `from headrace import LLM, SamplingParams`, with vLLM's names.

`api` is the class, `options` its keywords, `prompts` what may be asked, `batch` how an engine is turned until all is answered, `outputs`
what comes back. No server, no thread, no socket: the engine's loop runs in the calling thread.
"""

from __future__ import annotations

from headrace.core.sampling import SamplingParams
from headrace.llm.api import LLM
from headrace.llm.outputs import CompletionOutput, GenerationFailed, Logprob, RequestMetrics, RequestOutput

__all__ = ["LLM", "CompletionOutput", "GenerationFailed", "Logprob", "RequestMetrics", "RequestOutput", "SamplingParams"]
