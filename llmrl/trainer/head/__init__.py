"""The output head: log-probs, entropies and divergences from hidden states."""
