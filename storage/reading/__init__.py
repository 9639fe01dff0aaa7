"""Reading and verification of stored steps."""
