"""The compute engine: stateless units under Hugging Face's own forward, exact gradients, exact AdamW."""
