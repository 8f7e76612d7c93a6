"""Engines that run apart: HTTP servers, and how the trainer speaks to them."""
