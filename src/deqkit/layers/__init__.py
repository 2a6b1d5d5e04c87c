"""Stage 2: ids to embeddings, the cells f, and from states to probabilities."""

from deqkit.layers.baselines import ConvolutionConfig as ConvolutionConfig
from deqkit.layers.baselines import ConvolutionMemory as ConvolutionMemory
from deqkit.layers.baselines import ConvolutionNetwork as ConvolutionNetwork
from deqkit.layers.baselines import RecurrentConfig as RecurrentConfig
from deqkit.layers.baselines import RecurrentMemory as RecurrentMemory
from deqkit.layers.baselines import RecurrentNetwork as RecurrentNetwork
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
    "ConvolutionConfig",
    "ConvolutionMemory",
    "ConvolutionNetwork",
    "Embedding",
    "RecurrentConfig",
    "RecurrentMemory",
    "RecurrentNetwork",
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
