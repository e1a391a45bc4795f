"""Defines the configuration of one engine. The command line decodes it (`cli.config.load`); `resolve` makes of it the one that holds.

`EngineConfig` is the one list of engine options. Flags of the commands (`cli.flags.flag`), keywords of `LLM`, the checks of values and
the table in docs/config.md are made from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from headrace.core.adapters import MAX_ADAPTERS, AdapterSource, check_adapters
from headrace.core.errors import ConfigError
from headrace.core.model_info import LOAD_FORMATS
from headrace.core.option import Option, Reload, Role, by_device, check_options, option, options, required
from headrace.core.parallelism import AUTO, MOST, Parallelism
from headrace.core.speculation import SpeculativeConfig
from headrace.machine.gpus import Gpus, find_gpus
from headrace.policy.queues import QUEUES
from headrace.tensor.backends import BACKENDS, find_working_gpus
from headrace.tensor.checkpoint.formats.names import INSTEAD, METHODS

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""CPUs compute float16 in float32, which holds every value of it."""
ROUNDINGS = ("int8", "int4", "fp8")
"""Formats to which linears can be rounded at load."""
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8", "fp8")
"""fp8 in both: on GPUs that compute it (`tensor.device`)."""
DEVICES = ("auto", "cuda", "cpu")
NOT_ON_GPUS = "no layer is divided over GPUs"

FindGpus = Callable[[], Gpus]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of one replica, as they are given: None stands for a default of the device. Of `resolve`: with the device and values."""

    model: str = required(
        "A folder in the Hugging Face layout, a `.gguf` file, the name of a bundled model or, with `experimental`, a hub id.",
        flags=(),
        reload=Reload.RESTART,
    )
    dtype: str = option(
        "auto",
        "What is computed with. `auto`: the checkpoint's dtype, or float32 where this machine computes bfloat16 in software or linears are "
        "quantized.",
        one_of=DTYPES,
        other_names={"half": "float16", "float": "float32"},
        is_common=True,
    )
    load_format: str = option(
        "auto", "`dummy`: random weights of the shapes in config.json, to measure speed and memory.", one_of=LOAD_FORMATS
    )
    quantization: str = option(
        "none",
        "Weights of the linears are rounded at load: a step reads a half or a quarter of bfloat16's bytes, and results are less exact "
        "([kernels.md](kernels.md)). The name of a [checkpoint's format](models.md#quantized-checkpoints) is checked against `config.json` "
        "and rounds nothing.",
        "--quantization",
        "-q",
        one_of=("none", *ROUNDINGS, *METHODS),
        is_common=True,
    )
    kv_cache_dtype: str = option(
        "auto",
        "A smaller dtype holds more tokens in the same memory, and results are slightly less exact. `auto`: as computed, or bfloat16 where "
        "the checkpoint has it and this machine computes it; `fp8` on a GPU.",
        one_of=KV_CACHE_DTYPES,
        is_common=True,
    )
    max_model_len: int | None = option(
        None,
        "Longest context in tokens: a shorter one leaves memory for more sequences.",
        shown="the model's",
        low=1,
        is_common=True,
    )
    max_num_seqs: int = by_device(
        64,
        256,
        "Most sequences computed in one step: more of them give more tokens per second, and each stream is slower.",
        low=1,
        high=4096,
        is_common=True,
    )
    max_num_batched_tokens: int = by_device(
        512,
        8192,
        "Most tokens computed in one step: larger steps finish prompts sooner, and running streams wait longer between tokens.",
        low=1,
        high=2**20,
        is_common=True,
    )
    max_waiting: int = option(
        1024,
        "Most sequences that may wait; one more is refused with 429 and a retry time. A longer queue refuses fewer, which wait longer.",
        flags=(),
        low=1,
        high=10**6,
        role=Role.OPERATOR,
    )
    block_size: int = option(
        16, "Tokens per KV block: small blocks share more of equal prompts, large ones cost less bookkeeping.", low=1, high=2**20
    )
    num_kv_blocks: int | None = option(
        None, "Size of the KV cache in blocks, of each rank alike, instead of a share of memory.", shown="from `memory_fraction`", low=1
    )
    kv_cache_bytes: int | None = option(
        None, "Size of the KV cache of each rank in bytes, instead of a share of memory.", shown="from `memory_fraction`", low=1
    )
    memory_fraction: float = by_device(
        0.5,
        0.9,
        "Share for weights and KV together of the memory that machine and cgroup, or the GPU, leave.",
        "--gpu-memory-utilization",
        above=0.0,
        high=1,
        is_common=True,
    )
    memory_bytes: int | None = option(
        None,
        "Most bytes of weights, KV cache and a step together, of each rank alike, instead of a share of memory.",
        flags=(),
        shown="from `memory_fraction`",
        low=1,
    )
    enable_prefix_caching: bool = option(
        True, "Keep the KV of finished prompts, so that equal beginnings are not computed again.", is_common=True
    )
    enable_chunked_prefill: bool = option(True, "Split long prompts over steps. Off: running streams wait for a whole prompt.")
    queue_policy: str = option(
        "priority",
        "Which waiting sequence is computed first. `priority`: premium before standard before batch (a lower class gets a part once it has "
        "waited 10 s), each class shared between tiers by weight, a tier between its tenants alike; `fair` shares without classes "
        "([fairness.md](fairness.md)). "
        "`fcfs` (in order of arrival) and `sjf` (short requests first, with aging) ignore classes and tenants.",
        "--scheduling-policy",
        one_of=tuple(QUEUES),
        role=Role.TENANTS,
    )
    depth: int = by_device(
        1, 2, "2: plan the next step while one is computed.", "--async-scheduling/--no-async-scheduling", low=1, high=2, switch=(1, 2)
    )
    kernels: str = option(
        "auto",
        "`auto`: `numba` on a CPU, `triton` on a GPU. `reference`: plain torch, slow, against which the others are tested.",
        one_of=("auto", *BACKENDS),
    )
    deterministic: bool = option(
        False,
        "The same bits for a sequence alone and in any batch, preempted or not ([models.md](models.md#determinism)). Refused at start "
        "where the kernels cannot promise it.",
    )
    enforce_eager: bool = option(
        False,
        "On a GPU launch every kernel by itself and capture no graphs, to find a fault or to start sooner; steps of few rows are "
        "slower. The KV cache stays as large. A CPU captures none.",
    )
    num_threads: int | None = option(
        None,
        "Threads of one engine, of each rank where it has several: fewer leave cores to other processes.",
        shown="from cores and cgroup",
        low=1,
    )
    device: str = option(
        "auto", "`auto`: a GPU on which a first kernel runs, else the CPU ([gpu.md](gpu.md)).", one_of=DEVICES, is_common=True
    )
    seed: int = option(0, "Of random weights (`load_format: dummy`).")
    enable_lora: bool = option(
        False,
        "Serve LoRA adapters beside the model ([adapters.md](adapters.md)). Memory is set aside for them, and steps with adapters take "
        "longer; steps without are as before.",
        is_common=True,
    )
    lora_modules: tuple[AdapterSource, ...] = option((), "Its adapters: `name`, and `path` of a folder as PEFT saves it.", flags=())
    max_loras: int = option(8, "Most adapters that unfinished requests use at once; requests for more wait.", low=1, high=MAX_ADAPTERS)
    max_cpu_loras: int | None = option(
        None, "Most adapters kept in memory: one that is not is read again from its folder.", shown="`max_loras`", low=1, high=MAX_ADAPTERS
    )
    max_lora_rank: int = option(16, "Highest rank of an adapter: memory is set aside for `max_cpu_loras` of it.", low=1, high=512)

    speculative_config: SpeculativeConfig | None = option(
        None,
        "Draft tokens and compute them together with the known one: `method`, `num_speculative_tokens` and more, in JSON "
        "([speculation.md](speculation.md)). Few streams at once are faster; drafting switches itself off where it does not pay.",
        is_common=True,
    )

    tensor_parallel_size: int | str = option(
        1,
        "Processes that share each layer of a replica ([ranks.md](ranks.md)), for a model that is too large for one device. `auto`: what "
        "the planner chooses for this machine's CPUs.",
        "--tensor-parallel-size",
        "-tp",
        words=(AUTO,),
        low=1,
        high=MOST,
        is_common=True,
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages of a replica's layers, each a process or more, which compute a step each at the same time.",
        "--pipeline-parallel-size",
        "-pp",
        low=1,
        high=MOST,
    )
    enable_expert_parallel: bool = option(False, "Divide whole experts over the processes that share a layer, not each expert.")

    @property
    def parallelism(self) -> Parallelism:
        assert isinstance(self.tensor_parallel_size, int), "it is decided before processes are counted"
        return Parallelism(self.tensor_parallel_size, self.pipeline_parallel_size, self.enable_expert_parallel)

    @property
    def max_steps_in_flight(self) -> int:
        """Planned, and not committed: each stage of a pipeline computes one."""
        return max(self.depth, self.pipeline_parallel_size)

    @property
    def num_cpu_loras(self) -> int:
        return self.max_cpu_loras or self.max_loras

    def checked(self, find: FindGpus = find_gpus) -> EngineConfig:
        """As `resolve`, for the device of this machine. find: asked only where the device is "auto"."""
        return resolve(self, choose_device(self.device, find))

    def _check(self) -> None:
        if self.quantization in INSTEAD:
            raise ConfigError("quantization", f"{self.quantization!r} is not supported", INSTEAD[self.quantization])
        check_options(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is less than max_num_seqs ({self.max_num_seqs})",
                "Every running sequence needs one token per step.",
            )
        self._check_parallelism()
        self._check_adapters()
        self._check_speculation()

    def _check_parallelism(self) -> None:
        pp = self.pipeline_parallel_size
        if self.tensor_parallel_size == AUTO:
            if self.device != "cpu":
                raise ConfigError("tensor_parallel_size", f"{AUTO} may be more than 1: {NOT_ON_GPUS}", "Use 1, or device = cpu.")
            if pp > 1:
                reason = f"{AUTO} is decided for one stage, and pipeline_parallel_size is {pp}"
                raise ConfigError("tensor_parallel_size", reason, "Give both as numbers.")
            return
        tp, world = self.parallelism.tp, self.parallelism.world
        name, value = ("tensor_parallel_size", tp) if tp > 1 else ("pipeline_parallel_size", pp)
        if world > MOST:
            raise ConfigError(name, f"{tp} x {pp} (pipeline_parallel_size) are more than {MOST} processes", "Lower one of them.")
        if tp > 1 and self.device != "cpu":
            remedy = "Use 1, with pipeline_parallel_size for a model that is larger than a GPU, or device = cpu."
            raise ConfigError(name, f"{value} is more than 1: {NOT_ON_GPUS}", remedy)
        if pp > 1 and self.device != "cpu" and self.enable_lora:
            raise ConfigError("enable_lora", "is not supported on several GPUs", "Leave it out, or use pipeline_parallel_size = 1.")
        if pp > 1 < self.depth:
            raise ConfigError(
                "depth",
                f"{self.depth} is not supported beside pipeline_parallel_size = {pp}, where each stage computes a step of its own",
                "Leave it out: as many steps as stages are planned.",
            )

    def _check_adapters(self) -> None:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            reason = f"{self.max_cpu_loras} is less than max_loras ({self.max_loras})"
            raise ConfigError("max_cpu_loras", reason, "Every adapter in use is in memory.")
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules", "names adapters, and enable_lora is off", "Set enable_lora.")
        check_adapters(self.lora_modules)

    def _check_speculation(self) -> None:
        if self.speculative_config is None:
            return
        self.speculative_config.check("speculative_config")
        if self.device == "cuda":
            raise ConfigError("speculative_config", "is not supported on a GPU yet", "Leave it out, or use device = cpu.")

    def with_folders(self, find: Callable[[str], Path]) -> EngineConfig:
        """With local folders for its model, and for the one that drafts. Raises what `find` raises, and its ConfigError with the key."""
        named = replace(self, model=str(find(self.model)))
        drafting = self.speculative_config
        if drafting is None or not drafting.model:
            return named
        try:
            return replace(named, speculative_config=replace(drafting, model=str(find(drafting.model))))
        except ConfigError as error:
            raise error.at("speculative_config.model") from error


def resolve(config: EngineConfig, device: str) -> EngineConfig:
    """The options on a device, with unset ones filled in, if their rules hold. Of max_num_seqs and max_num_batched_tokens one that is unset
    fits the other. Raises ConfigError naming the option, the value and the remedy."""
    unset = {name: default_on(device, about) for name, about in options(EngineConfig) if about.on and getattr(config, name) is None}
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None and isinstance(tokens, int):
        unset["max_num_seqs"] = min(unset["max_num_seqs"], tokens)
    if tokens is None and isinstance(seqs, int):
        unset["max_num_batched_tokens"] = max(unset["max_num_batched_tokens"], seqs)
    if config.pipeline_parallel_size > 1 and "depth" in unset:
        unset["depth"] = 1  # of each stage
    resolved = replace(config, device=device, **unset)
    resolved._check()
    return resolved


def choose_device(asked: str, find: FindGpus = find_gpus) -> str:
    return asked if asked != "auto" else "cuda" if find().names else "cpu"


def default_on(device: str, described: Option) -> Any:
    """The default of an option on a device. An unknown device has the CPU's default: `resolve` refuses it."""
    return described.on.get(device, described.on["cpu"])


@cache
def find_gpus_to_start() -> Gpus:
    """For commands that start engines: GPUs on which a first kernel ran, which takes seconds. Logs once why there is none."""
    gpus = find_working_gpus()
    if gpus.problem:
        log.warning("device = auto takes the CPU: %s. %s", gpus.problem, gpus.remedy)
    return gpus
