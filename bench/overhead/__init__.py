"""What a gateway adds to a request: processes of `bench.gateway_overhead`."""
