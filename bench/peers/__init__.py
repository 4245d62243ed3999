"""Measures other systems on megatier's shapes. Each has a script, which writes a JSON row as `record` describes it."""
