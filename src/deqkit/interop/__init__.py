"""The outside world: models of other code."""

from deqkit.interop._keys import OriginalError as OriginalError
from deqkit.interop.import_run import import_original as import_original
from deqkit.interop.original import load_original as load_original

__all__ = ["OriginalError", "import_original", "load_original"]
