"""Measures the anonymous memory that a model load takes at its peak.

    python tools/measure_load_memory.py FOLDER [--kernels reference]

Loads in this process while a thread samples RssAnon from /proc/self/status every 2 ms. Then prints one JSON line: the peak above what the
process held before (libraries loaded), the bound (weights + largest fused tensor + 0.5 GiB), and whether it was kept. Mapped files are not
anonymous: they are page cache, which the kernel takes back when it needs to.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

import torch

from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.models import load_model
from headrace.tensor.models.decoder import DecoderModel

SLACK_BYTES = 2**29
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(kilobytes) * 1024


class PeakSampler(threading.Thread):
    """Samples until stopped; `peak` is the largest value seen."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return max(self.peak, anonymous_bytes())


def largest_linear_bytes(model: DecoderModel) -> int:
    """The largest fused tensor: what exists unpacked beside its packed form."""
    attention = [linear.weight_bytes for block in model.blocks for linear in block.attention.linears]
    mlp = [linear.weight_bytes for block in model.blocks for linear in block.mlp.linears]
    return max(*attention, *mlp, model.head.weight_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", default="reference", choices=["reference", "numba"])
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="to compute with; default: the checkpoint's")
    options = parser.parse_args()
    backend = load_backend(options.kernels)
    for dtype in (torch.float32, torch.bfloat16):
        backend.packing.pack_linear(
            torch.ones((64, 64), dtype=dtype), None
        )  # libraries and compilers warm up before, not within the measurement
    before = anonymous_bytes()
    sampler = PeakSampler()
    sampler.start()
    started = time.monotonic()
    loaded = load_model(
        options.folder,
        backend=backend,
        dtype=DTYPES.get(options.dtype),
        device=CPU,
        load_format="safetensors",
        seed=0,
        max_model_len=None,
    )
    seconds = time.monotonic() - started
    peak = sampler.stop() - before
    largest = largest_linear_bytes(loaded.model)
    bound = loaded.resident_bytes + largest + SLACK_BYTES
    report = {
        "kernels": options.kernels,
        "dtype": str(loaded.dtype),
        "weights_bytes": loaded.resident_bytes,
        "largest_linear_bytes": largest,
        "anonymous_before_bytes": before,
        "peak_above_before_bytes": peak,
        "bound_bytes": bound,
        "is_within_bound": peak <= bound,
        "seconds": round(seconds, 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
