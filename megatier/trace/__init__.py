"""Traces: they say what happened in a pass, and when."""
