"""Reads LoRA adapters from folders as PEFT saves them."""
