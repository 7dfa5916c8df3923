"""Command line of llmrl; `app` defines its commands."""
