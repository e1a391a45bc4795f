"""Changes the gateway's configuration while it runs: what may change, how a change is applied, and the requests for it."""
