"""A file a topic. What a seed draws depends on how many questions there are, and in which order."""

from minivllm.drills.questions import capacity, roofline, sizing, units

__all__ = ["capacity", "roofline", "sizing", "units"]
