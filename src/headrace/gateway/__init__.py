"""The gateway: surfaces, authentication, admission, streaming, usage. It sends replicas token ids, and turns token ids back into text."""
