"""What moves: the player of the timeline, and the lanes that it plays on."""
