"""Computes a model's size in bytes and FLOPs, the time of a step on given devices, and the best layout over them."""
