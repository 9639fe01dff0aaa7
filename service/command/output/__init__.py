"""Output of the commands: tables, listings, JSON, progress bars."""
