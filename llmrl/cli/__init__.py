"""The command line: `llmrl doctor`, `eval`, `view`, `demo`."""
