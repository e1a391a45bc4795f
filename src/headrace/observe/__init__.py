"""Makes the metrics page, the structured request log and the process log."""
