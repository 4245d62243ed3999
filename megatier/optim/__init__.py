"""The optimizers' arithmetic: planes of masters and moments, AdamW, Muon, their kernels, and learning rates."""
