"""Pure decisions: scheduler, KV blocks, queues, routing, limits. No torch, no sockets, no clock: `now` is an argument."""
