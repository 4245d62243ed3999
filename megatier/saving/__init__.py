"""A run's checkpoints, savepoints and exported models: when they are written, and by whom."""
