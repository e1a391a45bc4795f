"""Kernels for NVIDIA GPUs, written in Triton. `backend` composes them; only modules of this folder import triton."""
