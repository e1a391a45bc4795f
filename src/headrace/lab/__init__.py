"""The lab: a load generator, a fake engine on the real loop, and the figures of both. Only `cli`, benchmarks and tests import it."""
