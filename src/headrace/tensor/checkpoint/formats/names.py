"""Names of quantized formats, as vLLM has them, without torch: what `--quantization` may say, and the files beside config.json."""

from __future__ import annotations

METHODS = {
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "awq": "awq",
    "awq_marlin": "awq",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "fbgemm_fp8",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "gguf": "gguf",
}
"""Name -> the `quant_method` of the checkpoint's config.json. Marlin is a kernel of vLLM's; the stored format is the same."""

_READ = "Leave the option out: the format is read from the checkpoint."
INSTEAD = {
    "mxfp4": "It is of gpt-oss, which is not supported either; compressed-tensors has mxfp4 of other architectures.",
    "bitsandbytes": "Use the model's 16-bit weights and --quantization int8 or int4: bitsandbytes makes its files from these.",
    "experts_int8": "Use int8: it rounds the experts and the other linears.",
    "tpu_int8": "Use int8.",
    "deepspeedfp": "Use fp8.",
    "ptpc_fp8": "Use fp8.",
    "rtn": "Use int8 or int4.",
    "cpu_awq": _READ,
    "moe_wna16": _READ,
}
"""What is refused here, a `quant_method` or a name of vLLM's option -> what to do instead."""

SEPARATE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""File beside a config.json that names no quantization -> the format of its writer, AutoGPTQ, AutoAWQ or ModelOpt. The first counts."""
