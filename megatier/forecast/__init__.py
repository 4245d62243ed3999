"""How long a step takes: its jobs on each lane, those of several ranks, and their simulation."""
