"""Model, optimizer and the passes over them."""
