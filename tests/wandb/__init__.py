"""Weights & Biases, the real package."""
