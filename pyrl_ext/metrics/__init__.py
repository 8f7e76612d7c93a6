"""The numbers of a run: one definition a metric, the files they go to, and the report."""
