"""What one engine process is told at start. Decoded by the command line (`cli.config`), resolved once, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError

QUEUE_POLICIES = ("fcfs", "priority", "sjf", "fair")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
QUANTIZATIONS = ("none", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8")
KERNELS = ("auto", "numba", "reference")
BATCHING = ("continuous", "static")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One replica.

    model                   local folder in the Hugging Face layout (the fleet resolves hub ids to folders)
    dtype                   "auto": what the checkpoint says, or float32 where bfloat16 is computed in software, or linears are rounded
    load_format             "dummy": random weights from config.json
    quantization            "int8" | "int4": linears' weights are rounded at load, to nearest; inputs to 8 bits, row by row
    kv_cache_dtype          "auto": as computed, or bfloat16 where weights and CPU have it; "int8": rounded, a scale per token and head
    max_model_len           None: the model's own
    max_num_seqs            sequences computed in one step
    max_num_batched_tokens  tokens computed in one step: prefill chunks fill what decode leaves
    max_waiting             sequences that may wait; one more is refused with a retry time
    max_waiting_per_tenant  the same, of one tenant; None: one tenant may fill the queue
    block_size              tokens per KV block
    num_kv_blocks           None: from `memory_fraction` of what the machine and its cgroup leave
    kv_cache_bytes          None: see num_kv_blocks
    memory_fraction         share of the available memory for weights + KV
    enable_prefix_caching, enable_chunked_prefill   plain twins when False
    queue_policy            fcfs | priority | sjf | fair
    batching                "static" is the comparison baseline: a batch is filled, run to its end, then the next
    depth                   plans that may be uncommitted: 1 plain, 2 overlapped
    kernels                 "numba" | "reference" | "auto"
    num_threads             None: from the cores and the cgroup
    deterministic           the same bits for a sequence alone and in any batch; refused at start where the kernels cannot promise it
    device                  "cpu" | "cuda"
    seed                    of `dummy` weights
    """

    model: str
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_waiting: int = 1024
    max_waiting_per_tenant: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    memory_fraction: float = 0.5
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    queue_policy: str = "fcfs"
    batching: str = "continuous"
    depth: int = 1
    kernels: str = "auto"
    deterministic: bool = False
    num_threads: int | None = None
    device: str = "cpu"
    seed: int = 0

    def checked(self) -> EngineConfig:
        """This value if its rules hold. Raises ConfigError naming the option, the value and the remedy."""
        for name, allowed in (
            ("dtype", DTYPES),
            ("load_format", LOAD_FORMATS),
            ("quantization", QUANTIZATIONS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("queue_policy", QUEUE_POLICIES),
            ("batching", BATCHING),
            ("kernels", KERNELS),
            ("device", ("cpu", "cuda")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(name, f"{getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name, low, high in (
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 2**20),
            ("max_waiting", 1, 10**6),
            ("block_size", 1, 2**20),
            ("depth", 1, 2),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(name, f"{getattr(self, name)} is outside {low}..{high}")
        for name in ("max_model_len", "num_kv_blocks", "kv_cache_bytes", "num_threads", "max_waiting_per_tenant"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, f"{value} is not positive")
        if self.max_waiting_per_tenant is not None and self.max_waiting_per_tenant > self.max_waiting:
            raise ConfigError(
                "max_waiting_per_tenant",
                f"{self.max_waiting_per_tenant} is more than max_waiting ({self.max_waiting}), so that it would never act",
                "Lower it, or leave it out: one tenant may then fill the queue.",
            )
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError("memory_fraction", f"{self.memory_fraction} is outside 0..1", "It is a share of the available memory.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is less than max_num_seqs ({self.max_num_seqs})",
                "Every running sequence needs one token per step.",
            )
        return self
