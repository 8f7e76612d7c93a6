"""The trainer's tensors to the engine, proved."""
