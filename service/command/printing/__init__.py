"""How the command shows what it was asked for: tables, listings, JSON."""
