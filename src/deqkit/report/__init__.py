"""Stage 8: one self-contained HTML page about a run, or about several side by side."""

from deqkit.report.page import write_report as write_report

__all__ = ["write_report"]
