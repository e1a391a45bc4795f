"""One signature set: `reference` (plain torch, the truth), `cpu` (Numba)."""
