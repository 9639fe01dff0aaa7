"""What happened, for who wants to be told or to act on it."""
