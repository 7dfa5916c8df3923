"""Names that only TorchRL's interface needs, one module per namespace.

`llmrl.envs`, `llmrl.transforms` and `llmrl.tools` re-export them.
"""
