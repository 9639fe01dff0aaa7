"""Durable jobs: the engine that runs them, their records, and all kinds of jobs."""
