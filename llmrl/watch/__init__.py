"""What is watched while a run trains: metrics, findings, trackers, the live view."""
