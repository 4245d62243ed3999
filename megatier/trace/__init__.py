"""What happened in a pass, and when."""
