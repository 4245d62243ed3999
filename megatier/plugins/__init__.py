"""What other training programs load: a plugin of Axolotl, and a launcher of LLaMA-Factory."""
