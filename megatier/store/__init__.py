"""The tiered store. Imports nothing, so that planning can use `store.tier` without torch."""
