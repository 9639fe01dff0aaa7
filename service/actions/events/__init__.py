"""Actions on events and webhooks."""
