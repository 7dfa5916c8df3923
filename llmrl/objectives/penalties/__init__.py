"""Penalties that change rewards before advantages are computed."""
