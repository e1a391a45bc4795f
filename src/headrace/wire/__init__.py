"""Connects gateways to engine processes over gRPC: the message format, its codec, the gateway's client, and what both ends agree on."""
