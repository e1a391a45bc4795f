"""Authentication, open requests, and the memory that requests are charged."""
