"""What is learnt.

How rows become examples and batches, how loss is weighted, which metrics evaluate the model.
"""

from optrun.task.base import ModelNeeds, Task, TextKind
from optrun.task.build import build_task

__all__ = ["ModelNeeds", "Task", "TextKind", "build_task"]
