"""Paged attention on the CPU: the plan of a step's work, one item of it, the kernels."""
