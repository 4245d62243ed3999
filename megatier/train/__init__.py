"""A run: what opens, steps and ends it, what it saves, and the plan before it."""
