"""From logits to tokens: penalties, filters, counter-based randomness, log-probabilities.

Read `sampler` first: it keeps per-slot parameters and says the order in which they act. `filters` turns logits into one token per row,
`penalties` counts tokens, `philox` makes the random numbers, `logprobs` reports. Everything is numpy on the host: rows are processed in
chunks that stay in the cache, no row ever looks at another, and a thread pool would cost more than it gives at these sizes.
"""

from headrace.tensor.sampling.logprobs import prompt_logprobs, top_tokens
from headrace.tensor.sampling.philox import Purpose, uniform
from headrace.tensor.sampling.sampler import Sampled, Sampler

__all__ = ["Purpose", "Sampled", "Sampler", "prompt_logprobs", "top_tokens", "uniform"]
