"""Commands beside training: measure, export, prebuild."""
