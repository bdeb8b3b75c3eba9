"""Partitioning, placement, pipeline schedules, their executor and simulator. Planned, exports nothing yet."""

__all__: list[str] = []
