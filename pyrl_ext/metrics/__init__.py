"""What a run reports: one definition a metric, where it is written, and the report at the end."""
