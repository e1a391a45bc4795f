"""The gateway: surfaces, auth, admission, streaming, usage. Sends token ids, turns token ids back into text."""
