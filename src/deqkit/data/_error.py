"""What is wrong with the data, said in one line with the remedy."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used: missing, empty, not text, cut short, changed, or too little."""


class VocabularyMismatchError(DataError):
    """A corpus whose vocabulary is not the one a model was trained with."""
