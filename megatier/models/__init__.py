"""Hugging Face decoders: their units, how experts are cut and parts frozen, their weights in and out of files."""
