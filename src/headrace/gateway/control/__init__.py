"""Changes the gateway's configuration while it runs."""
