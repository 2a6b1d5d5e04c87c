"""The outside world: models of other code."""

from deqkit.interop._keys import OriginalError as OriginalError
from deqkit.interop.original import load_original as load_original

__all__ = ["OriginalError", "load_original"]
