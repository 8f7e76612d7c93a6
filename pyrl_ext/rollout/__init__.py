"""Engines that generate samples, and how ranks share them."""
