"""Stage 1, text to token ids: corpora and their vocabularies, resumable batches, copy memory."""

from deqkit.data._batches import AbstractBatches as AbstractBatches
from deqkit.data._batches import Batch as Batch
from deqkit.data._copy_memory import CopyBatches as CopyBatches
from deqkit.data._copy_memory import CopyGrowth as CopyGrowth
from deqkit.data._copy_memory import CopyMemory as CopyMemory
from deqkit.data._copy_memory import copy_memory as copy_memory
from deqkit.data._error import DataError as DataError
from deqkit.data._error import VocabularyMismatchError as VocabularyMismatchError
from deqkit.data._manifest import Manifest as Manifest
from deqkit.data._prepare import PrepareConfig as PrepareConfig
from deqkit.data._prepare import prepare as prepare
from deqkit.data.corpus import Corpus as Corpus
from deqkit.data.corpus import check_vocabulary as check_vocabulary
from deqkit.data.corpus import open_corpus as open_corpus
from deqkit.data.embedded import embedded_corpus as embedded_corpus
from deqkit.data.embedded import embedded_text as embedded_text
from deqkit.data.streams import EvaluationPass as EvaluationPass
from deqkit.data.streams import Streams as Streams

__all__ = [
    "AbstractBatches",
    "Batch",
    "CopyBatches",
    "CopyGrowth",
    "CopyMemory",
    "Corpus",
    "DataError",
    "EvaluationPass",
    "Manifest",
    "PrepareConfig",
    "Streams",
    "VocabularyMismatchError",
    "check_vocabulary",
    "copy_memory",
    "embedded_corpus",
    "embedded_text",
    "open_corpus",
    "prepare",
]
