"""The run folder and Ctrl-C."""
