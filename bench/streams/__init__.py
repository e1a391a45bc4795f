"""Holds the processes of `bench.stream_cost`: an engine that says a known text at a fixed pace, a client that reads cheaply, and a look at
the gateway's event loop.
"""
