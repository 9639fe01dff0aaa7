"""Commands for administrators: keys, workers, webhooks, roots, the audit trail."""
