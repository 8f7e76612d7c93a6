"""Advantages, losses, and the log-probs that they need."""
