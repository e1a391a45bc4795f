"""The configuration of one engine. Decoded by the command line (`cli.config`), resolved once, never changed.

`EngineConfig` is the one list of engine options: flags of the commands (`cli.engine_flags`), keywords of `LLM` and the checks of values
are made from it, so that a new option is one line here and its row in docs/config.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TypeVar, cast

from headrace.core.errors import ConfigError
from headrace.core.gpus import find_gpus
from headrace.core.model_info import LOAD_FORMATS
from headrace.policy.queues import QUEUES
from headrace.tensor.backends import BACKENDS, find_working_gpus
from headrace.tensor.checkpoint.formats.names import INSTEAD, METHODS

log = logging.getLogger(__name__)

Value = TypeVar("Value")

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""CPUs compute float16 in float32, which holds every value of it."""
ROUNDINGS = ("int8", "int4", "fp8")
"""How linears may be rounded at load."""
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8", "fp8")
"""fp8 in both: on GPUs that compute it (`tensor.device`)."""
BATCHING = ("continuous", "static")
DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An engine option's description, beside its field's type and default.

    help         for people, in one sentence or a few words
    default      value of the field where it is not set; None where `on` has it
    flags        of the commands; None: --the-name, and --no-the-name of a bool. Empty: it has none
    one_of       values that are allowed; other_names: vLLM's names for some of them
    low, high    what it may be, both included; None: no limit
    switch       (off, on): its flag is --x/--no-x, and these are the values
    on           default by device, for a field that was not set; empty: one default for all devices
    """

    help: str
    default: object = None
    flags: tuple[str, ...] | None = None
    one_of: tuple[str, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    low: int | None = None
    high: int | None = None
    switch: tuple[int, int] | None = None
    on: Mapping[str, object] = field(default_factory=dict)

    @property
    def shown_default(self) -> str:
        """For help texts, as Python writes it: `64, on a GPU 256` where it depends on the device."""
        return f"{self.on['cpu']!r}, on a GPU {self.on['cuda']!r}" if self.on else repr(self.default)

    def check(self, name: str, value: object) -> None:
        """Raises ConfigError when `value` is none of `one_of`, or outside `low`..`high`. None means that the option was not set."""
        if self.one_of and value not in self.one_of:
            raise ConfigError(name, f"{value!r} is not one of {', '.join(self.one_of)}")
        if self.low is None or value is None:
            return
        if type(value) is not int:
            raise ConfigError(name, f"{value!r} is not a whole number")
        if self.high is None and value < self.low:
            raise ConfigError(name, f"{value} is not positive" if self.low == 1 else f"{value} is less than {self.low}")
        if self.high is not None and not self.low <= value <= self.high:
            raise ConfigError(name, f"{value} is outside {self.low}..{self.high}")


def option(default: Value, help: str, *flags: str, **rest: object) -> Value:
    """A field with its `Option`. flags: as there, none given: made from the name; `flags=()`: it has none."""
    if flags:
        rest["flags"] = flags
    return field(default=default, metadata={"option": Option(help=help, default=default, **rest)})  # type: ignore[arg-type]


def by_device(cpu: Value, gpu: Value, help: str, *flags: str, **rest: object) -> Value:
    """A field with its `Option`, whose default depends on the device. It is None for a moment only: `EngineConfig` fills it in."""
    return option(cast(Value, None), help, *flags, on={"cpu": cpu, "cuda": gpu}, **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One replica. What each option trades is said in docs/config.md. A value holds no default by device and no device "auto" any more.

    model            local folder in the Hugging Face layout (the fleet resolves hub ids to folders)
    memory_fraction  without `num_kv_blocks` and `kv_cache_bytes` the KV cache is what this share of the machine's and its cgroup's memory
                     leaves beside the weights
    batching         "static" is the comparison baseline: a batch is filled, run to its end, then the next
    depth            plans that may be uncommitted: 1 plain, 2 overlapped
    """

    model: str
    dtype: str = option(
        "auto",
        "What is computed with; auto: the checkpoint's, or float32 where bfloat16 is computed in software or weights are rounded.",
        one_of=DTYPES,
        other_names={"half": "float16", "float": "float32"},
    )
    load_format: str = option("auto", "dummy: random weights from config.json.", one_of=LOAD_FORMATS)
    quantization: str = option(
        "none",
        "Weights of the linears are rounded at load; the name of a checkpoint's format is checked against it, and rounds nothing.",
        "--quantization",
        "-q",
        one_of=("none", *ROUNDINGS, *METHODS),
    )
    kv_cache_dtype: str = option("auto", "auto: as computed, or bfloat16 where weights and CPU have it.", one_of=KV_CACHE_DTYPES)
    max_model_len: int | None = option(None, "Longest context in tokens. Default: the model's.", low=1)
    max_num_seqs: int = by_device(64, 256, "Sequences computed in one step.", low=1, high=4096)
    max_num_batched_tokens: int = by_device(512, 8192, "Tokens computed in one step: prompts fill what decoding leaves.", low=1, high=2**20)
    max_waiting: int = option(1024, "Sequences that may wait; one more is refused with a retry time.", flags=(), low=1, high=10**6)
    max_waiting_per_tenant: int | None = option(None, "The same, of one tenant. Default: all of them.", flags=(), low=1)
    block_size: int = option(16, "Tokens per KV block.", low=1, high=2**20)
    num_kv_blocks: int | None = option(None, "KV blocks. Default: what the share of memory allows.", low=1)
    kv_cache_bytes: int | None = option(None, "Memory of the KV cache. Default: what the share of memory allows.", low=1)
    memory_fraction: float = by_device(0.5, 0.9, "Share of the available memory for weights and KV.", "--gpu-memory-utilization")
    enable_prefix_caching: bool = option(True, "Reuse the KV of equal prompt beginnings.")
    max_cached_share_per_tenant: float = option(
        0.5, "Share of the KV blocks that one tenant's cached prefixes may fill before they are evicted first.", flags=()
    )
    enable_chunked_prefill: bool = option(True, "Split long prompts over steps.")
    queue_policy: str = option("priority", "Which waiting sequence is computed first.", "--scheduling-policy", one_of=tuple(QUEUES))
    batching: str = option("continuous", "static: a batch runs to its end before the next begins.", flags=(), one_of=BATCHING)
    depth: int = by_device(
        1, 2, "Plan the next step while one is computed.", "--async-scheduling/--no-async-scheduling", low=1, high=2, switch=(1, 2)
    )
    kernels: str = option("auto", "reference: plain torch.", one_of=("auto", *BACKENDS))
    deterministic: bool = option(
        False, "The same bits for a sequence alone and in any batch; refused at start where the kernels cannot promise it."
    )
    num_threads: int | None = option(None, "Default: from the cores and the cgroup.", low=1)
    device: str = option("auto", "auto: a GPU that works, else the CPU.", one_of=DEVICES)
    seed: int = option(0, "Of random weights (--load-format dummy).")

    def __post_init__(self) -> None:
        """Choose the device, and fill in what was not set. Where steps or sequences are set alone, the other is made to fit."""
        if self.device == "auto":
            object.__setattr__(self, "device", _auto_device())
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        for name, described in options():
            if described.on and getattr(self, name) is None:
                object.__setattr__(self, name, default_on(self.device, described))
        if seqs is None and isinstance(tokens, int):
            object.__setattr__(self, "max_num_seqs", min(self.max_num_seqs, tokens))
        if tokens is None and isinstance(seqs, int):
            object.__setattr__(self, "max_num_batched_tokens", max(self.max_num_batched_tokens, seqs))

    def checked(self) -> EngineConfig:
        """This value if its rules hold. Raises ConfigError naming the option, the value and the remedy."""
        if self.quantization in INSTEAD:
            raise ConfigError("quantization", f"{self.quantization!r} is not supported", INSTEAD[self.quantization])
        for name, described in options():
            described.check(name, getattr(self, name))
        if self.max_waiting_per_tenant is not None and self.max_waiting_per_tenant > self.max_waiting:
            raise ConfigError(
                "max_waiting_per_tenant",
                f"{self.max_waiting_per_tenant} is more than max_waiting ({self.max_waiting}), so that it would never act",
                "Lower it, or leave it out: one tenant may then fill the queue.",
            )
        if not 0.0 < self.max_cached_share_per_tenant <= 1.0:
            rule = f"{self.max_cached_share_per_tenant} is outside 0..1"
            raise ConfigError("max_cached_share_per_tenant", rule, "1 treats the blocks of all tenants alike.")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError("memory_fraction", f"{self.memory_fraction} is outside 0..1", "It is a share of the available memory.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is less than max_num_seqs ({self.max_num_seqs})",
                "Every running sequence needs one token per step.",
            )
        return self


_is_starting = False


def try_gpus() -> None:
    """From now on "auto" takes a GPU in this process only where a first kernel ran on it, and a notice says why it takes the CPU instead.

    For commands that start engines, before they read options: the trial takes seconds, and other commands read options as well.
    """
    global _is_starting
    _is_starting = True


def _auto_device() -> str:
    """The device that "auto" is here."""
    gpus = find_working_gpus() if _is_starting else find_gpus()
    if gpus.problem and _is_starting:
        _say_unused(f"{gpus.problem}. {gpus.remedy}")
    return "cuda" if gpus.names else "cpu"


@cache
def _say_unused(why: str) -> None:
    """Once in a process, however many options are read."""
    log.warning("device = auto takes the CPU: %s", why)


def default_on(device: str, described: Option) -> object:
    """The default of an option on a device; of a device that is not known, the CPU's: `EngineConfig.checked` refuses it."""
    return described.on.get(device, described.on["cpu"])


def options() -> Iterator[tuple[str, Option]]:
    """(field, what is said of it) of every option, in order; all but `model`."""
    for item in fields(EngineConfig):
        if "option" in item.metadata:
            yield item.name, item.metadata["option"]
