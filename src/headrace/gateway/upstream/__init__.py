"""Where answers come from: the seam, our own engines over the wire, and the models that are served."""
