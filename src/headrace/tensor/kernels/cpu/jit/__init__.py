"""How kernels are written and run: vector instructions for Numba, launching on all threads, the compile cache."""
