"""One initialize() over the ds packages, driven by DeepSpeed's JSON."""
