"""Commands that run servers: `serve`, `gateway` and `engine`."""
