"""What is refused because it would make a step silently wrong."""
