"""``make gpu``: everything that asks for a GPU, run part by part, in one report."""
