"""Which settings fit a machine, and how long a step takes with them."""
