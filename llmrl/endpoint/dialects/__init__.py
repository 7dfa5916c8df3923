"""The dialects of the APIs: pure functions from JSON to requests, and from replies to JSON or events."""
