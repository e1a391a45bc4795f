"""The planner: from a model and devices to memory, layouts, rates and costs, before any hardware is bought.

The command: `headrace plan`. What is computed and from what: docs/planning.md.
"""
