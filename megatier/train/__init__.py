"""A run from its first step to its export, and what ends it early."""
