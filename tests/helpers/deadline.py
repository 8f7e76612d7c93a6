"""Longest time that a test waits for an event."""

# Ends a hang [s], and measures nothing: no wait takes as long, on however busy a machine.
DEADLINE = 900.0
