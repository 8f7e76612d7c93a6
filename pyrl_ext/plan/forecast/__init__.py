"""Forecasts of a plan: memory, time, and layouts that do better."""
