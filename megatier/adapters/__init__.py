"""LoRA adapters over a frozen base: PEFT's layers in a skeleton, their first weights, and their folders."""
