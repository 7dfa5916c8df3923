"""The output head: log-probs, entropies and divergences of hidden states."""
