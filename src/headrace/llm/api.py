"""Provides `LLM`, a model in this process that runs in the calling thread, beside its other ranks."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.adapters import AdapterSource
from headrace.core.errors import ConfigError, EngineFatal, InvalidRequest, Unavailable
from headrace.core.grammar import Grammar
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import MAX_SEED, SamplingParams, params_from_mapping, with_default_max_tokens
from headrace.core.structured import StructuredOutputsParams
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.lab.plan.here import decide_layout
from headrace.llm.adapters import LoRARequest, LoRARequests, folders_to_read, parse_lora_requests
from headrace.llm.batch import ProgressLine, PromptBatch, PromptJob, outputs_of
from headrace.llm.options import ENGINE_FIELDS, described, engine_config, refuse_unsupported
from headrace.llm.outputs import RequestOutput
from headrace.llm.prompts import ParsedPrompt, Prompt, parse_conversations, parse_params, parse_prompts
from headrace.machine.forks import FORKS, ForkedProcess
from headrace.machine.standard_streams import open_standard_descriptors
from headrace.text.folder import TextModel, load_text
from headrace.text.messages import Message, begun_answer
from headrace.text.output.formats import ModelFormats
from headrace.text.tokenizer import Tokenizer

Build = Callable[[EngineConfig, Outbox], Engine]


class LLM:
    """A model in this process. Use it as a context manager, or call `shutdown` to free it.

    model                   a bundled model's name, a local folder, a .gguf file, or a hub id; None: the bundled model
    seed                    seed of dummy weights, and of the seeds drawn for requests without one; None: drawn from the system
    experimental            allow what has not been run where Headrace is tested: hub ids

    The engine's options, those of `EngineConfig` under vLLM's names:

    {engine_options}

    Any other keyword is refused by name, unless its value asks for what happens anyway (`data_parallel_size=1`).

    In a fork of this process the LLM cannot be used, nor another one made: start such processes with "spawn".

    Raises: ConfigError, CheckpointError, ForkedProcess.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        load_format: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool | None = None,
        enable_chunked_prefill: bool | None = None,
        gpu_memory_utilization: float | None = None,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        scheduling_policy: str | None = None,
        seed: int | None = None,
        kernels: str | None = None,
        deterministic: bool | None = None,
        enforce_eager: bool | None = None,
        num_threads: int | None = None,
        device: str | None = None,
        tensor_parallel_size: int | str | None = None,
        pipeline_parallel_size: int | None = None,
        enable_expert_parallel: bool | None = None,
        depth: int | None = None,
        enable_lora: bool | None = None,
        max_loras: int | None = None,
        max_cpu_loras: int | None = None,
        max_lora_rank: int | None = None,
        speculative_config: Mapping[str, object] | None = None,
        experimental: bool = False,
        **unsupported: object,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in ENGINE_FIELDS}
        refuse_unsupported(unsupported, _KEYWORDS)
        folder = _resolve(model, experimental=experimental)
        config = engine_config(folder, given).with_folders(partial(_resolve, experimental=experimental))
        config = decide_layout(config, folder)
        self._start(config, load_text(folder), seed, _build_engine)

    @classmethod
    def over(cls, build: Build, text: TextModel, *, config: EngineConfig, seed: int | None = None) -> Self:
        self = cls.__new__(cls)
        self._start(config.checked(), text, seed, build)
        return self

    def _start(self, config: EngineConfig, text: TextModel, seed: int | None, build: Build) -> None:
        self._config = config
        self._text = text
        self._inbox: deque[SequenceUpdate | Rejected] = deque()
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._numbers = count()
        self._adapters: Mapping[str, LoRARequest] = {}
        self._adapter_sources: Mapping[str, AdapterSource] = {}
        self._lock = Lock()
        self._is_open = True
        self._num_forks = FORKS.count
        self._engine = build(config, self._inbox.extend)

    # -- generating --------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Continue prompts. Answers are in the order of the prompts.

        prompts          a text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these. Control tokens in a text
                         are read as such: for conversations with users' text use `chat`
        sampling_params  one for all, or one per prompt; None: the model's own defaults
        use_tqdm         show progress when standard error is a terminal
        lora_request     an adapter for all, or one or None per prompt; None: the base model

        Raises: InvalidRequest before anything runs, but for structured outputs that cannot be compiled, which end the call when the engine
        refuses them; GenerationFailed when a sequence failed, once the rest is done; `.outputs` has all. ForkedProcess in a fork.
        """
        self._refuse_in_fork()
        return self._run(parse_prompts(prompts, self._text.tokenizer), sampling_params, lora_request, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's own template.

        tools                 shown to the model by its template; calls in the answer are left in its text, as vLLM leaves them
        chat_template         only None: the model's own is used
        chat_template_kwargs  scalars for variables the template reads (e.g. enable_thinking)

        Control tokens in messages are ordinary text. Raises: as `generate`.
        """
        self._refuse_in_fork()
        if chat_template is not None:
            raise InvalidRequest("chat_template", "None", chat_template, "Put a chat_template.jinja into a copy of the model's folder.")
        parsed = []
        for conversation in parse_conversations(messages):
            ids = self._text.template.encode(
                self._text.tokenizer,
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            text = self._text.tokenizer.decode(ids, skip_special_tokens=False)
            begun = begun_answer(conversation, continue_final_message=continue_final_message)
            parsed.append(ParsedPrompt(tuple(ids), text, is_conversation=True, begun=begun))
        return self._run(parsed, sampling_params, lora_request, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults, from its generation_config.json."""
        return params_from_mapping(self._engine.info.sampling_defaults)

    @property
    def is_open(self) -> bool:
        """False after `shutdown`, and after the engine died."""
        return self._is_open

    @property
    def engine(self) -> Engine:
        """For reading `info` and `snapshot()`."""
        return self._engine

    # -- ending ------------------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free the model. Safe to call twice. In a fork it does nothing: the engine is the other process's."""
        if FORKS.count != self._num_forks:
            return
        with self._lock:
            if self._is_open:
                self._close()

    def _close(self) -> None:
        self._is_open = False
        self._engine.stop()
        self._engine.run()  # returns at once and closes the runner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _refuse_in_fork(self) -> None:
        if FORKS.count != self._num_forks:
            raise ForkedProcess

    def _run(
        self,
        prompts: list[ParsedPrompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequests,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if not isinstance(use_tqdm, bool):
            raise InvalidRequest("use_tqdm", "True or False", type(use_tqdm).__name__)
        loras = parse_lora_requests(lora_request, len(prompts))
        params = parse_params(given, len(prompts), self.get_default_sampling_params())
        if given is None:
            max_model_len = self._engine.info.max_model_len
            params = [
                with_default_max_tokens(each, each.max_tokens, max_model_len - len(p.token_ids))
                for each, p in zip(params, prompts, strict=True)
            ]
        with self._lock:
            if not self._is_open:
                raise Unavailable("this LLM has been shut down")
            self._read_adapters([lora for lora in loras if lora is not None])
            jobs = [
                self._job(prompt, each, lora, f"prompts[{number}]")
                for number, (prompt, each, lora) in enumerate(zip(prompts, params, loras, strict=True))
            ]
            batch = PromptBatch(self._engine, self._inbox, max_waiting=self._config.max_waiting)
            try:
                batch.run(jobs, ProgressLine(len(jobs), is_on=use_tqdm))
            except EngineFatal:
                self._close()
                raise
        return outputs_of(jobs)

    def _job(self, prompt: ParsedPrompt, params: SamplingParams, lora: LoRARequest | None, field: str) -> PromptJob:
        if params.seed is None:
            params = params.with_(seed=self._random.randint(0, MAX_SEED))
        info, structured = self._engine.info, params.structured_outputs
        try:
            request = EngineRequest(
                request_id=RequestId(str(next(self._numbers))),
                prompt_ids=prompt.token_ids,
                params=params if structured is None else params.with_(structured_outputs=None),
                grammar=None if structured is None else self._grammar(structured, prompt),
                adapter=lora.lora_name if lora else None,
                adapter_digest=info.adapters[lora.lora_name] if lora else "",
            )
            request.checked(vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        except InvalidRequest as error:
            error.add_note(f"in {field}")
            raise
        grammar_field = structured.field if structured else "grammar"
        return PromptJob(request, prompt.text, self._text.tokenizer, lora_request=lora, grammar_field=grammar_field)

    def _read_adapters(self, asked: Sequence[LoRARequest]) -> None:
        """Raises InvalidRequest, CheckpointError."""
        if asked and not self._config.enable_lora:
            raise InvalidRequest("lora_request", "None: this LLM has no adapters", asked[0].lora_name, "Make it with enable_lora=True.")
        new = folders_to_read(self._adapters, asked)
        if new:
            read = {name: AdapterSource(name=name, path=str(_resolve_adapter(one.lora_path))) for name, one in new.items()}
            sources = {**self._adapter_sources, **read}
            self._engine.set_adapters(list(sources.values()), changed=new)
            self._adapters, self._adapter_sources = {**self._adapters, **new}, sources

    def _grammar(self, structured: StructuredOutputsParams, prompt: ParsedPrompt) -> Grammar:
        """In a conversation, as on a server, it binds after the model's reasoning."""
        grammar = structured.as_grammar()
        if not prompt.is_conversation:
            return grammar
        tokenizer = self._text.tokenizer
        formats = ModelFormats.of(tokenizer, self._text.template)
        return replace(grammar, reasoning=formats.reasoning_span(tokenizer, prompt.token_ids, prompt.begun))


_KEYWORDS = frozenset(LLM.__init__.__kwdefaults__ or ())
LLM.__doc__ = (LLM.__doc__ or "").replace("{engine_options}", described(_KEYWORDS))


def _resolve(model: str | Path | None, *, experimental: bool) -> Path:
    if model is None:
        folder = bundled_path(DEFAULT_MODEL)
        if folder is None:
            raise ConfigError("model", f"this installation does not contain {DEFAULT_MODEL}", "Give a model folder.")
        return folder
    # From here on it may be a hub id; the offline path with a bundled model does not need the fleet.
    from headrace.fleet.weights import resolve_model

    return resolve_model(str(model), experimental=experimental)


def _resolve_adapter(path: str) -> Path:
    from headrace.fleet.weights import resolve_adapter

    return resolve_adapter(path)


def _build_engine(config: EngineConfig, outbox: Outbox) -> Engine:
    # torch is imported here, not with this module: a mistaken keyword or prompt is refused at once.
    from headrace.llm.members import build_ranks
    from headrace.tensor.host.openmp import prepare_openmp

    open_standard_descriptors()  # else a socket of the engine may be what a print of this program goes to
    prepare_openmp(os.environ)
    return build_ranks(config, outbox)
