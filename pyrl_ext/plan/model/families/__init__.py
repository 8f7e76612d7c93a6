"""Model families: sizes, megatron's config and the weight table in one class each."""
