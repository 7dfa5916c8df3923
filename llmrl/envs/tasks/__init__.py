"""Tasks: problems and their rewards."""
