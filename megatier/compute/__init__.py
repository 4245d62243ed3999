"""The arithmetic of layers: compilation, attention, products, tiles, quantised weights; and what repeats its bits."""
