"""Commands that hold a conversation in the terminal: `chat` and `agent`."""
