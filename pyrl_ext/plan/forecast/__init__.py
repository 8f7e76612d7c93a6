"""What a plan will need and take: memory, time, and layouts that do better."""
