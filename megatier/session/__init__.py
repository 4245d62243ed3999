"""A run's parts, opened and closed together."""
