"""Model configs: frozen, JSON in and out."""
