"""Notices a run in which nothing moves any more, and stops it."""
