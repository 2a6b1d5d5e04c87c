"""Stage 2: ids to embeddings, the cells f, and from states to probabilities."""

from deqkit.layers.compose import stack as stack
from deqkit.layers.compose import tie as tie
from deqkit.layers.embedding import Embedding as Embedding
from deqkit.layers.embedding import VocabularyConfig as VocabularyConfig
from deqkit.layers.softmax import Softmax as Softmax
from deqkit.layers.transformer import TransformerCell as TransformerCell
from deqkit.layers.transformer import TransformerConfig as TransformerConfig
from deqkit.layers.transformer import TransformerMemory as TransformerMemory
from deqkit.layers.trellis import TrellisCell as TrellisCell
from deqkit.layers.trellis import TrellisConfig as TrellisConfig
from deqkit.layers.trellis import TrellisMemory as TrellisMemory

__all__ = [
    "Embedding",
    "Softmax",
    "TransformerCell",
    "TransformerConfig",
    "TransformerMemory",
    "TrellisCell",
    "TrellisConfig",
    "TrellisMemory",
    "VocabularyConfig",
    "stack",
    "tie",
]
