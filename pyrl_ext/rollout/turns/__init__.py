"""Trajectories of several turns: conversations of an engine with environments."""
