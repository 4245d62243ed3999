"""What a run is, before anything moves."""
