"""Computes plans with tensors. `build` makes a runner from an engine's configuration.

`model_runner` computes each step when it is submitted, or on a thread of its own; `device` is for devices whose steps are launched first
and finished later. `batch`, `slots`, `state`, `masks` and `results` are shared by all.
"""
