"""Durable jobs: convert, gather, restore; `engine` runs them."""
