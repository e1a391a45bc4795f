"""From logits to tokens: penalties, filters, counter-based randomness, log-probabilities. Read `sampler` first.

Everything is numpy on the host: rows are processed in chunks that stay in the cache, and no row depends on another. Kernels may do the
most expensive parts, the filters of random rows and grammar masks, instead (`kernels.cpu.draw`, `kernels.cpu.mask`).
"""

from headrace.tensor.sampling.logprobs import prompt_logprobs, top_tokens
from headrace.tensor.sampling.philox import uniform
from headrace.tensor.sampling.sampler import NO_ROWS_MASKED, RowMasks, Sampled, Sampler

__all__ = ["NO_ROWS_MASKED", "RowMasks", "Sampled", "Sampler", "prompt_logprobs", "top_tokens", "uniform"]
