"""Refuses settings and overrides of trainers that a streamed model cannot follow."""
