"""Linear layers of int8 and int4 weights on the CPU."""
