"""Training runs: the companion of their loop, their folder, checkpoints, evaluations and exports."""
