"""Commands next to training: measure, export, prebuild."""
