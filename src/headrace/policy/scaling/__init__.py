"""Decides how many replicas of a model to have, from its load and what it was on earlier days."""
