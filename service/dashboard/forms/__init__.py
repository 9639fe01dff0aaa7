"""Routes of the pages' forms. Each calls the same action as the API's route."""
