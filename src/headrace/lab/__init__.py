"""Measures and predicts: a load generator, a fake engine on the real loop, a planner and a simulator. Only `cli`, benchmarks and tests
import it.
"""
