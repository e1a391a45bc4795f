"""Holds the processes of `bench.gateway_overhead`: the client and the server that answers."""
