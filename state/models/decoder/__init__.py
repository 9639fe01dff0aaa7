"""The one decoder: every family is a set of its options."""
