"""Several processes that train one model: what they tell each other, what they move, and how one ends them all."""
