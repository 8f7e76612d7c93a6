"""Sizes of the model families, one a file, named after HF's ``model_type``: each has ``SIZES``."""
