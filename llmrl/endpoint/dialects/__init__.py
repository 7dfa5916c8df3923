"""API dialects: pure functions from JSON to requests, and from replies to JSON or events."""
