"""The kernels of the CPU. `backend` implements the `Kernels` protocol with them."""
