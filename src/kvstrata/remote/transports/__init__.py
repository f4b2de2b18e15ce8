"""Ways to read another engine's memory."""
