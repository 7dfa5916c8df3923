"""What is here for calls of TorchRL's alone: a module for each of its namespaces.

`llmrl.envs`, `llmrl.transforms` and `llmrl.tools` hand its names on.
"""
