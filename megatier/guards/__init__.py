"""Guards: they refuse whatever would make a step silently wrong."""
