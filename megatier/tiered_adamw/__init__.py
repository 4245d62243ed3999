"""AdamW and Muon with their state on tiers, as torch optimizers in any loop."""
