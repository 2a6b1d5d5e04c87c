"""The sections of a run: each takes what was measured and returns markup that stands for itself."""
