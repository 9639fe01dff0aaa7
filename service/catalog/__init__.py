"""The catalog: an index of what the store holds, and the audit trail of what was done here."""
