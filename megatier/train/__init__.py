"""A run from its first step to its export, and the ways in which it ends early."""
