"""Monitoring of a training run: metrics, health findings, trackers, live view."""
