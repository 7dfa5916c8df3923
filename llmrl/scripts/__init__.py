"""The training scripts of `sota-implementations/` as modules (`python -m llmrl.scripts.NAME`), and `train`."""
