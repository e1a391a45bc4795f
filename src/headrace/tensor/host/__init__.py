"""The machine: CPU features, threads, memory for weights, private cache folders."""
