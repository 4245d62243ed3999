"""What moves: the player of the timeline, and the queues that it plays on."""
