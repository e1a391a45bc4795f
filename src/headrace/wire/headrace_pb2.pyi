from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_PREMIUM: _ClassVar[Priority]
    PRIORITY_STANDARD: _ClassVar[Priority]
    PRIORITY_BATCH: _ClassVar[Priority]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_GENERATE: _ClassVar[Task]
    TASK_EMBED: _ClassVar[Task]
    TASK_SCORE: _ClassVar[Task]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_LARK: _ClassVar[GrammarKind]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_UNSPECIFIED: _ClassVar[MissReason]
    MISS_NEVER_SEEN: _ClassVar[MissReason]
    MISS_EVICTED: _ClassVar[MissReason]
    MISS_ANOTHER_SALT: _ClassVar[MissReason]
    MISS_LESS_THAN_A_BLOCK: _ClassVar[MissReason]
    MISS_NOT_USED: _ClassVar[MissReason]

class FinishKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[FinishKind]
    FINISH_STOP: _ClassVar[FinishKind]
    FINISH_LENGTH: _ClassVar[FinishKind]
    FINISH_CANCELLED: _ClassVar[FinishKind]
    FINISH_DEADLINE: _ClassVar[FinishKind]
    FINISH_ERROR: _ClassVar[FinishKind]

class RejectKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_UNSPECIFIED: _ClassVar[RejectKind]
    REJECT_INVALID: _ClassVar[RejectKind]
    REJECT_TOO_LARGE: _ClassVar[RejectKind]
    REJECT_MODEL_NOT_FOUND: _ClassVar[RejectKind]
    REJECT_OVERLOADED: _ClassVar[RejectKind]
    REJECT_UNAVAILABLE: _ClassVar[RejectKind]
    REJECT_FAILED: _ClassVar[RejectKind]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_PREMIUM: Priority
PRIORITY_STANDARD: Priority
PRIORITY_BATCH: Priority
TASK_UNSPECIFIED: Task
TASK_GENERATE: Task
TASK_EMBED: Task
TASK_SCORE: Task
GRAMMAR_UNSPECIFIED: GrammarKind
GRAMMAR_JSON_SCHEMA: GrammarKind
GRAMMAR_REGEX: GrammarKind
GRAMMAR_LARK: GrammarKind
MISS_UNSPECIFIED: MissReason
MISS_NEVER_SEEN: MissReason
MISS_EVICTED: MissReason
MISS_ANOTHER_SALT: MissReason
MISS_LESS_THAN_A_BLOCK: MissReason
MISS_NOT_USED: MissReason
FINISH_UNSPECIFIED: FinishKind
FINISH_STOP: FinishKind
FINISH_LENGTH: FinishKind
FINISH_CANCELLED: FinishKind
FINISH_DEADLINE: FinishKind
FINISH_ERROR: FinishKind
REJECT_UNSPECIFIED: RejectKind
REJECT_INVALID: RejectKind
REJECT_TOO_LARGE: RejectKind
REJECT_MODEL_NOT_FOUND: RejectKind
REJECT_OVERLOADED: RejectKind
REJECT_UNAVAILABLE: RejectKind
REJECT_FAILED: RejectKind

class KvGroup(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "dtype_bytes", "window", "scale_bytes")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SCALE_BYTES_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int
    scale_bytes: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype_bytes: _Optional[int] = ..., window: _Optional[int] = ..., scale_bytes: _Optional[int] = ...) -> None: ...

class Scalar(_message.Message):
    __slots__ = ("number", "integer", "flag", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: float
    integer: int
    flag: bool
    text: str
    def __init__(self, number: _Optional[float] = ..., integer: _Optional[int] = ..., flag: bool = ..., text: _Optional[str] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("architecture", "vocab_size", "max_model_len", "eos_token_ids", "kv_groups", "block_size", "num_blocks", "dtype", "weight_bytes", "sampling_defaults", "digests", "decided", "numerics", "queue_policy", "adapters")
    class SamplingDefaultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Scalar
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Scalar, _Mapping]] = ...) -> None: ...
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class NumericsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POLICY_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    block_size: int
    num_blocks: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    weight_bytes: int
    sampling_defaults: _containers.MessageMap[str, Scalar]
    digests: _containers.ScalarMap[str, str]
    decided: _containers.RepeatedScalarFieldContainer[str]
    numerics: _containers.ScalarMap[str, str]
    queue_policy: str
    adapters: _containers.ScalarMap[str, str]
    def __init__(self, architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., kv_groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., sampling_defaults: _Optional[_Mapping[str, Scalar]] = ..., digests: _Optional[_Mapping[str, str]] = ..., decided: _Optional[_Iterable[str]] = ..., numerics: _Optional[_Mapping[str, str]] = ..., queue_policy: _Optional[str] = ..., adapters: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ClientHello(_message.Message):
    __slots__ = ("protocol_version", "client", "digests", "vocab_size")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client: str
    digests: _containers.ScalarMap[str, str]
    vocab_size: int
    def __init__(self, protocol_version: _Optional[int] = ..., client: _Optional[str] = ..., digests: _Optional[_Mapping[str, str]] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class EngineHello(_message.Message):
    __slots__ = ("protocol_version", "instance_id", "replica", "model")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    instance_id: str
    replica: str
    model: ModelFacts
    def __init__(self, protocol_version: _Optional[int] = ..., instance_id: _Optional[str] = ..., replica: _Optional[str] = ..., model: _Optional[_Union[ModelFacts, _Mapping]] = ...) -> None: ...

class Params(_message.Message):
    __slots__ = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias_ids", "logit_bias_values", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logprobs", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "detokenize")
    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    detokenize: bool
    def __init__(self, n: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., include_stop_str_in_output: bool = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., skip_special_tokens: bool = ..., spaces_between_special_tokens: bool = ..., detokenize: bool = ...) -> None: ...

class ReasoningSpan(_message.Message):
    __slots__ = ("start", "end", "is_open")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    start: str
    end: str
    is_open: bool
    def __init__(self, start: _Optional[str] = ..., end: _Optional[str] = ..., is_open: bool = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source", "reasoning")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    source: str
    reasoning: ReasoningSpan
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., source: _Optional[str] = ..., reasoning: _Optional[_Union[ReasoningSpan, _Mapping]] = ...) -> None: ...

class TierTerms(_message.Message):
    __slots__ = ("name", "weight", "kv_share", "ttft_ms", "tpot_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    KV_SHARE_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    kv_share: float
    ttft_ms: float
    tpot_ms: float
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ..., kv_share: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "epoch", "prompt_ids", "output_ids", "params", "tenant", "weight", "priority", "salt", "adapter", "deadline_remaining_ms", "prefix_caching", "first_index", "task", "grammar", "adapter_digest", "kv_ticket", "modality_digests", "numerics_digest", "tier")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_TICKET_FIELD_NUMBER: _ClassVar[int]
    MODALITY_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    epoch: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    params: Params
    tenant: str
    weight: float
    priority: Priority
    salt: bytes
    adapter: str
    deadline_remaining_ms: int
    prefix_caching: bool
    first_index: int
    task: Task
    grammar: Grammar
    adapter_digest: str
    kv_ticket: bytes
    modality_digests: _containers.RepeatedScalarFieldContainer[bytes]
    numerics_digest: str
    tier: TierTerms
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[Params, _Mapping]] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., priority: _Optional[_Union[Priority, str]] = ..., salt: _Optional[bytes] = ..., adapter: _Optional[str] = ..., deadline_remaining_ms: _Optional[int] = ..., prefix_caching: bool = ..., first_index: _Optional[int] = ..., task: _Optional[_Union[Task, str]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., adapter_digest: _Optional[str] = ..., kv_ticket: _Optional[bytes] = ..., modality_digests: _Optional[_Iterable[bytes]] = ..., numerics_digest: _Optional[str] = ..., tier: _Optional[_Union[TierTerms, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("handle", "index", "keep_tokens", "reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KEEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    index: int
    keep_tokens: int
    reason: FinishKind
    def __init__(self, handle: _Optional[int] = ..., index: _Optional[int] = ..., keep_tokens: _Optional[int] = ..., reason: _Optional[_Union[FinishKind, str]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("submit", "cancel", "finish")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    finish: Finish
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class ClientFrame(_message.Message):
    __slots__ = ("hello", "commands", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: ClientHello
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    ping: int
    def __init__(self, hello: _Optional[_Union[ClientHello, _Mapping]] = ..., commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ..., ping: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "ranks", "top_counts", "top_ids", "top_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("row", "values")
    ROW_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    row: int
    values: Logprobs
    def __init__(self, row: _Optional[int] = ..., values: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class RowFinish(_message.Message):
    __slots__ = ("row", "reason", "stop_token_id", "error", "stages")
    ROW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    row: int
    reason: FinishKind
    stop_token_id: int
    error: str
    stages: StageSeconds
    def __init__(self, row: _Optional[int] = ..., reason: _Optional[_Union[FinishKind, str]] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[str] = ..., stages: _Optional[_Union[StageSeconds, _Mapping]] = ...) -> None: ...

class StageSeconds(_message.Message):
    __slots__ = ("queue", "prefill", "decode", "preempted", "stalled", "entered_stages", "entered_s")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    ENTERED_STAGES_FIELD_NUMBER: _ClassVar[int]
    ENTERED_S_FIELD_NUMBER: _ClassVar[int]
    queue: float
    prefill: float
    decode: float
    preempted: float
    stalled: float
    entered_stages: _containers.RepeatedScalarFieldContainer[int]
    entered_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, queue: _Optional[float] = ..., prefill: _Optional[float] = ..., decode: _Optional[float] = ..., preempted: _Optional[float] = ..., stalled: _Optional[float] = ..., entered_stages: _Optional[_Iterable[int]] = ..., entered_s: _Optional[_Iterable[float]] = ...) -> None: ...

class RowFirst(_message.Message):
    __slots__ = ("row", "num_cached_tokens", "queue_time_s", "miss_reason")
    ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    row: int
    num_cached_tokens: int
    queue_time_s: float
    miss_reason: MissReason
    def __init__(self, row: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queue_time_s: _Optional[float] = ..., miss_reason: _Optional[_Union[MissReason, str]] = ...) -> None: ...

class Updates(_message.Message):
    __slots__ = ("handles", "indices", "token_counts", "token_ids", "finished", "first", "logprobs", "prompt_logprobs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedCompositeFieldContainer[RowFinish]
    first: _containers.RepeatedCompositeFieldContainer[RowFirst]
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[_Union[RowFinish, _Mapping]]] = ..., first: _Optional[_Iterable[_Union[RowFirst, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "kind", "message", "field", "limit", "value", "remedy", "retry_after_s", "served")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    kind: RejectKind
    message: str
    field: str
    limit: str
    value: str
    remedy: str
    retry_after_s: float
    served: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, handle: _Optional[int] = ..., kind: _Optional[_Union[RejectKind, str]] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., limit: _Optional[str] = ..., value: _Optional[str] = ..., remedy: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., served: _Optional[_Iterable[str]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "kv_blocks_free", "kv_blocks_cached", "kv_blocks_used", "kv_blocks_total", "step_age_s", "step_predicted_s", "loop_age_s", "counters", "num_queued_tokens", "max_num_seqs", "step_fixed_s", "step_token_s", "classes", "step_prompt_tokens", "num_running_highest", "cpu_s", "resident_bytes", "peak_read_bytes_per_s", "peak_flops_per_s", "gpu_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes", "running_adapters", "waiting_adapters", "max_loras", "adapter_pool_bytes", "adapter_pool_highest_bytes", "is_asleep")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    LOOP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIXED_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    STEP_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_HIGHEST_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GPU_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_POOL_HIGHEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_ASLEEP_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    kv_blocks_free: int
    kv_blocks_cached: int
    kv_blocks_used: int
    kv_blocks_total: int
    step_age_s: float
    step_predicted_s: float
    loop_age_s: float
    counters: Counters
    num_queued_tokens: int
    max_num_seqs: int
    step_fixed_s: float
    step_token_s: float
    classes: _containers.RepeatedCompositeFieldContainer[ClassLoad]
    step_prompt_tokens: int
    num_running_highest: int
    cpu_s: float
    resident_bytes: int
    peak_read_bytes_per_s: float
    peak_flops_per_s: float
    gpu_utilization: float
    gpu_memory_used_bytes: int
    gpu_memory_total_bytes: int
    running_adapters: _containers.RepeatedScalarFieldContainer[str]
    waiting_adapters: _containers.RepeatedScalarFieldContainer[str]
    max_loras: int
    adapter_pool_bytes: int
    adapter_pool_highest_bytes: int
    is_asleep: bool
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., step_age_s: _Optional[float] = ..., step_predicted_s: _Optional[float] = ..., loop_age_s: _Optional[float] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., num_queued_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., step_fixed_s: _Optional[float] = ..., step_token_s: _Optional[float] = ..., classes: _Optional[_Iterable[_Union[ClassLoad, _Mapping]]] = ..., step_prompt_tokens: _Optional[int] = ..., num_running_highest: _Optional[int] = ..., cpu_s: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., peak_read_bytes_per_s: _Optional[float] = ..., peak_flops_per_s: _Optional[float] = ..., gpu_utilization: _Optional[float] = ..., gpu_memory_used_bytes: _Optional[int] = ..., gpu_memory_total_bytes: _Optional[int] = ..., running_adapters: _Optional[_Iterable[str]] = ..., waiting_adapters: _Optional[_Iterable[str]] = ..., max_loras: _Optional[int] = ..., adapter_pool_bytes: _Optional[int] = ..., adapter_pool_highest_bytes: _Optional[int] = ..., is_asleep: bool = ...) -> None: ...

class ClassLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_queued_tokens")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("step_seconds", "finished", "failures", "step_buckets", "plain", "accepted_per_position", "hottest_expert_tokens", "stage_idle_microseconds")
    class FinishedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PlainEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AcceptedPerPositionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class HottestExpertTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StageIdleMicrosecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    STEP_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_EXPERT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STAGE_IDLE_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    step_seconds: float
    finished: _containers.ScalarMap[str, int]
    failures: _containers.ScalarMap[str, int]
    step_buckets: _containers.RepeatedScalarFieldContainer[int]
    plain: _containers.ScalarMap[str, int]
    accepted_per_position: _containers.ScalarMap[str, int]
    hottest_expert_tokens: _containers.ScalarMap[str, int]
    stage_idle_microseconds: _containers.ScalarMap[str, int]
    def __init__(self, step_seconds: _Optional[float] = ..., finished: _Optional[_Mapping[str, int]] = ..., failures: _Optional[_Mapping[str, int]] = ..., step_buckets: _Optional[_Iterable[int]] = ..., plain: _Optional[_Mapping[str, int]] = ..., accepted_per_position: _Optional[_Mapping[str, int]] = ..., hottest_expert_tokens: _Optional[_Mapping[str, int]] = ..., stage_idle_microseconds: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class EngineFrame(_message.Message):
    __slots__ = ("hello", "updates", "rejected", "load", "submits_seen", "draining", "weights_digest", "pings_seen", "adapters")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_SEEN_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PINGS_SEEN_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    hello: EngineHello
    updates: Updates
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    load: Load
    submits_seen: int
    draining: Draining
    weights_digest: str
    pings_seen: int
    adapters: AdapterList
    def __init__(self, hello: _Optional[_Union[EngineHello, _Mapping]] = ..., updates: _Optional[_Union[Updates, _Mapping]] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., submits_seen: _Optional[int] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., weights_digest: _Optional[str] = ..., pings_seen: _Optional[int] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("digests",)
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.ScalarMap[str, str]
    def __init__(self, digests: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("num_open",)
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    num_open: int
    def __init__(self, num_open: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("hello", "load", "draining", "num_streams", "num_open")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    hello: EngineHello
    load: Load
    draining: bool
    num_streams: int
    num_open: int
    def __init__(self, hello: _Optional[_Union[EngineHello, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., draining: bool = ..., num_streams: _Optional[int] = ..., num_open: _Optional[int] = ...) -> None: ...
