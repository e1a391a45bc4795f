"""What `--quantization` may say beside a rounding of our own, without torch: names of formats, as vLLM has them."""

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
"""Name -> the `quant_method` that the checkpoint's config.json must say. Marlin is a kernel of vLLM's; the stored format is the same."""
