"""Text datasets: documents, tokens, packed sequences with a position that can be resumed."""
