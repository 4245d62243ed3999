"""The arithmetic itself: kernels, AdamW, matrix products, and what makes them repeatable."""
