"""Weights between Hugging Face checkpoints, PEFT adapters and megatron's live tensors."""
