"""The scheduler: sequences, the planner of a step, and what a finished step means."""
