"""Checkpoint folders in the Hugging Face layout: files, headers, configuration, tensors read by slice."""
