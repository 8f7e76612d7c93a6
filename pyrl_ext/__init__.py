"""RL post-training of mixture-of-experts language models on Megatron. Importing this is free."""

from pkgutil import extend_path

# Run from a source tree, the native module is found where `pip install .` put it.
__path__ = extend_path(__path__, __name__)
__version__ = "0.3.0"
