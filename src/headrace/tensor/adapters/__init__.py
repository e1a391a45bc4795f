"""Reads LoRA adapters from folders as PEFT saves them. `loader` is the entry; `config` reads adapter_config.json."""
