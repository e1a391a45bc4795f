"""Asks the operating system: memory, CPUs, GPUs, cgroups, folders, signals, standard streams, addresses of hosts."""
