"""Computes plans with tensors."""
