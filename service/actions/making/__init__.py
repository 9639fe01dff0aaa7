"""Making what others go on in: runs before their jobs."""
