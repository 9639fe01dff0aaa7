"""The typed client of the HTTP API. Imports nothing of the server."""
