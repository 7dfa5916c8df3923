"""Training runs: configuration, folder, evaluation, live view, trackers, viewer."""
