"""Saved runs: checkpoints, savepoints and the run directory."""
