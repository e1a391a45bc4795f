"""Runs the process that loads the models' tokenizers and templates and forks the text workers."""
