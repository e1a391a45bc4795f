"""The process that loads the models' text and forks the text workers. `text_workers` is the gateway's side of it."""
