"""Runs a model on a device whose steps are launched first and finished later: tensors at fixed addresses, captured graphs."""
