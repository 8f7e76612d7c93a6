"""Samples to the rows of a rank: layout, schedule, batch, microbatch."""
