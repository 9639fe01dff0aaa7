"""Events, and the webhooks that they are sent to."""
