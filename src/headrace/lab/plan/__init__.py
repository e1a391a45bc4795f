"""Plans hardware before it is bought: computes memory, layouts, rates and costs from a model and devices.

The command is `headrace plan`. docs/planning.md says what is computed, and from what.
"""
