"""Events and webhooks: registration, deliveries, and the thread that sends them."""
