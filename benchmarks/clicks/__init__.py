"""Counts what a hand does in Cairn's dashboard, and in MLflow's, for ten tasks."""
