"""ZeRO-1/2/3 sharding for a plain PyTorch loop."""
