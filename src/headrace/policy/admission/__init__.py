"""Whether a request may join a busy model's queue. Pure: loads in, verdict out."""
