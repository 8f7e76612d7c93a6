"""YAML to values: files and their parents, sizes, line numbers, errors."""
