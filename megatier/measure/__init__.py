"""Measures what the drives, links and processors of a machine do."""
