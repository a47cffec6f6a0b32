"""What is shown and written to people: built from plain data, one module per output.

``summary`` holds the data of a run, ``tables`` renders it and explanations as text, ``files`` writes it as JSON,
``explanation`` is the object that ``torch_echo.explain`` returns. rich is imported by ``tables`` only.
"""

from torch_echo.report.summary import Summary

__all__ = ["Summary"]
