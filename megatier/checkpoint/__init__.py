"""What a run goes on from: checkpoints, savepoints and the run directory."""
