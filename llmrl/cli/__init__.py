"""The command line: `llmrl doctor`, `eval`, `view`, `chat`, `demo`."""
