"""Runs the process that loads the models' tokenizers and templates and forks the text workers. `text_workers` is the gateway's side of the
process.
"""
