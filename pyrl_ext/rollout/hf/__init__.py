"""The embedded engine: continuous batching on transformers."""
