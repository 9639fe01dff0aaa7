"""What forms of pages ask for: each calls the action that the API's route calls."""
