"""SFT, reward models, PPO, DPO and GRPO: planned, exports nothing yet."""

__all__: list[str] = []
