"""KV blocks: who owns which, what may be reused. `pool` is one group's blocks, `manager` a sequence's view over all groups."""
