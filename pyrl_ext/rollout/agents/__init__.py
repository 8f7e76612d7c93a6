"""Agents: programs that call an OpenAI-compatible endpoint, whose tokens are trained on."""
