"""Says into how many ranks a model divides."""

from __future__ import annotations

from headrace.core.errors import ConfigError
from headrace.core.parallelism import Parallelism, why_indivisible
from headrace.tensor.layers.mlp import MlpSpec
from headrace.tensor.models.spec import DecoderSpec


def check_division(spec: DecoderSpec, parallelism: Parallelism) -> None:
    """Raises ConfigError, which names the option, for ranks that would not have equal parts."""
    tp, pp, ep = parallelism.tp, parallelism.pp, parallelism.ep
    if ep and all(isinstance(layer.mlp, MlpSpec) for layer in spec.layers):
        raise ConfigError("enable_expert_parallel", "this model has no experts", "Leave it out.")
    if ep and tp == 1:
        raise ConfigError("enable_expert_parallel", "experts are divided over tensor_parallel_size ranks, and it is 1", "Set both.")
    if reason := _why_not(spec, tp, ep=ep):
        fitting = ", ".join(str(smaller) for smaller in range(1, tp) if not _why_not(spec, smaller, ep=ep))
        raise ConfigError("tensor_parallel_size", f"{tp}: {reason}", f"Use one of {fitting}.")
    if pp > (layers := len(spec.layers)):
        raise ConfigError("pipeline_parallel_size", f"{pp} is more than the {layers} layers of this model", f"Use at most {layers}.")


def _why_not(spec: DecoderSpec, tp: int, *, ep: bool) -> str:
    """Empty: the layers divide into `tp` parts."""
    for layer in spec.layers:
        heads, kv_heads, mlp = layer.attention.heads, layer.attention.kv_heads, layer.mlp
        features = (mlp.size,) if isinstance(mlp, MlpSpec) or not ep else ()
        if reason := why_indivisible(tp, heads=heads, kv_heads=kv_heads, features=features, vocab_size=spec.vocab_size):
            return reason
        if not isinstance(mlp, MlpSpec) and ep and mlp.num_experts % tp:
            return f"{mlp.num_experts} experts do not divide by it"
    return ""
