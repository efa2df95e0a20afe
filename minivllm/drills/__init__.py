"""Napkin drills: interview questions with a number for an answer, drawn anew from a seed.

A drill knows the right value with its explanation, and the values that well-known mistakes lead to: a wrong answer that
is one of them is told which. To add one, write a function in `questions/<topic>.py` that takes a random generator and
returns a `Drill`, and decorate it with its topic. Standard library only.
"""

from minivllm.drills import questions  # importing them fills the topics
from minivllm.drills.answers import UNITS, Drill, Verdict
from minivllm.drills.play import Quiz, play
from minivllm.drills.topics import TOPICS, draw, make, maker_of

__all__ = ["TOPICS", "UNITS", "Drill", "Quiz", "Verdict", "draw", "make", "maker_of", "play", "questions"]
