"""Tensors: kernels < layers < models; beside them loading and sampling."""
