"""Tensors: kernels < layers < models; beside them loading and sampling. Imports core and torch, never policy or engine."""
