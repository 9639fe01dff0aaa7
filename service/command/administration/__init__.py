"""Commands for who runs the service: keys, workers, webhooks, the audit trail."""
