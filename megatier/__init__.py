"""Train models larger than RAM on one GPU, at full precision, over three tiers: GPU, RAM and NVMe."""
