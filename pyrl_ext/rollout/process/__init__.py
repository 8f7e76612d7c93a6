"""An engine in a separate process."""
