"""Command line of llmrl: `doctor`, `eval`, `view`, `chat`, `push`, `serve`, `demo`."""
