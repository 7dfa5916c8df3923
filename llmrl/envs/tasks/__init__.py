"""Tasks: problems and a reward each."""
