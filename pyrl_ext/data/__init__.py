"""Prompts, tasks, rewards and the tokenizer."""
