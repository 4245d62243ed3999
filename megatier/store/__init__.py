"""The tiered store: arenas, block files and queues. This file imports nothing, so that planning runs without torch."""
