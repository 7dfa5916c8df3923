"""A causal language model as the trainer computes it: exactly, over packed rows."""
