"""Other systems on megatier's shapes: one script each, one JSON row each, as `record` describes it."""
