"""Events, for webhooks and automations."""
