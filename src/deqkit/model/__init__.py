"""Stages 2, 3 and 4 put together: `SequenceModel`, its configuration, and the paper's own."""

from deqkit.model.config import ModelConfig as ModelConfig
from deqkit.model.decode import Generation as Generation
from deqkit.model.output import ModelOutput as ModelOutput
from deqkit.model.parameters import ParameterCount as ParameterCount
from deqkit.model.parameters import num_parameters as num_parameters
from deqkit.model.sequence import SequenceModel as SequenceModel

__all__ = ["Generation", "ModelConfig", "ModelOutput", "ParameterCount", "SequenceModel", "num_parameters"]
