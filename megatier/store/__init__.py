"""The tiered store: arenas, copies and queues. This file imports nothing, so that planning runs without torch."""
