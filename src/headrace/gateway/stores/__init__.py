"""Where gateways keep what must outlive a request: one seam (`store`), an embedded implementation and one for several machines."""
