"""Looking into steps and runs: leaves, values, what differs, what a mesh needs, what they take."""
