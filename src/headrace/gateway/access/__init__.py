"""Authentication, the admitted requests, and the memory that requests hold."""
