"""Changes of rewards that come before advantages."""
