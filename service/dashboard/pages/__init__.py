"""Pages, one subject per file."""
