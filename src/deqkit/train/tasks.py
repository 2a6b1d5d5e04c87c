"""What a run learns: batches for training, passes for evaluation, and the figures that matter."""

from __future__ import annotations

import abc
import functools
import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from deqkit.data import (
    AbstractBatches,
    Batch,
    CopyGrowth,
    CopyMemory,
    Corpus,
    EvaluationPass,
    Streams,
    embedded_corpus,
    open_corpus,
)
from deqkit.train.config import DataConfig, TrainConfig

COPY_SYMBOLS = 10
BUILT_IN = ("embedded", "copy-memory")
"""Data that is the same wherever deqkit is."""


class AbstractTask(abc.ABC):
    """A source of batches, shared out among processes by `rank` and `world_size`."""

    vocab_size: int
    fingerprint: str
    """Of the vocabulary: a model knows tokens by their numbers."""
    data_hash: str
    headline: str
    """The figure by which models are compared."""

    @abc.abstractmethod
    def training(self, *, rank: int, world_size: int) -> AbstractBatches: ...

    @abc.abstractmethod
    def evaluation(self, split: str, *, rank: int = 0, world_size: int = 1) -> Iterable[Batch]: ...

    @abc.abstractmethod
    def figures(self, nll_sum: float, count: int, split: str) -> dict[str, float]:
        """What is reported, from the summed loss over a split."""


class TextTask(AbstractTask):
    """Language modelling on a corpus."""

    headline = "perplexity"

    def __init__(self, corpus: Corpus, config: DataConfig) -> None:
        self.corpus, self._config = corpus, config
        self.vocab_size, self.fingerprint, self.data_hash = corpus.vocab_size, corpus.fingerprint, corpus.data_hash

    def training(self, *, rank: int, world_size: int) -> AbstractBatches:
        config = self._config
        ids = self.corpus.split("train")
        return Streams(ids, batch=config.batch, length=config.length, rank=rank, world_size=world_size)

    def evaluation(self, split: str, *, rank: int = 0, world_size: int = 1) -> Iterable[Batch]:
        config, ids = self._config, self.corpus.split(split)
        return EvaluationPass(ids, batch=config.eval_batch, length=config.eval_length, rank=rank, world_size=world_size)

    def figures(self, nll_sum: float, count: int, split: str) -> dict[str, float]:
        loss = nll_sum / count
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        num_bytes = self.corpus.manifest.splits[split].num_text_bytes
        if num_bytes:  # of the part that was evaluated, if it was not all
            share = count / (len(self.corpus.split(split)) - 1)
            figures["bits_per_byte"] = nll_sum / math.log(2) / (num_bytes * share)
        return figures


class CopyTask(AbstractTask):
    """Copy memory, as in the paper."""

    headline = "loss"
    vocab_size = COPY_SYMBOLS

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._config = config
        sizes = {"num_train": config.copy_train, "num_valid": config.copy_test, "num_test": config.copy_test}
        self.data = CopyMemory(T=config.copy_T, seed=seed, **sizes)
        self.fingerprint = "copy-memory"
        self.data_hash = hashlib.sha256(repr(self.data).encode()).hexdigest()

    def training(self, *, rank: int, world_size: int) -> AbstractBatches:
        config, growth = self._config, None
        if config.copy_first_T is not None:
            growth = CopyGrowth(first_T=config.copy_first_T, steps=config.copy_first_steps)
        return self.data.batches(batch=config.batch, growth=growth, rank=rank, world_size=world_size)

    def evaluation(self, split: str, *, rank: int = 0, world_size: int = 1) -> Iterable[Batch]:
        return self.data.evaluation(split, batch=self._config.eval_batch, rank=rank, world_size=world_size)

    def figures(self, nll_sum: float, count: int, split: str) -> dict[str, float]:
        return {"loss": nll_sum / count}


def make_task(config: TrainConfig) -> AbstractTask:
    """The task of a configuration, checked against its model.

    Raises:
        ValueError: the model has another number of tokens than the data.
    """
    task = open_task(config)
    size = config.model.vocabulary.size
    if size != task.vocab_size:
        raise ValueError(
            f"the model has {size:,} tokens and the data {task.vocab_size:,}: "
            f"pass --model.vocabulary.size {task.vocab_size}, or other data"
        )
    return task


def resolve(config: TrainConfig) -> TrainConfig:
    """The configuration with nothing left to be read off the data."""
    if not config.data.fit_vocabulary:
        return config
    vocabulary = replace(config.model.vocabulary, size=open_task(config).vocab_size)
    return replace(
        config,
        model=replace(config.model, vocabulary=vocabulary),
        data=replace(config.data, fit_vocabulary=False),
    )


def open_task(config: TrainConfig) -> AbstractTask:
    """The task of a configuration, whatever its model."""
    source = config.data.source
    if source == "copy-memory":
        return CopyTask(config.data, config.seed)
    if source == "embedded":
        return TextTask(_embedded(config.data.embedded_vocabulary), config.data)
    if not source:
        raise ValueError(
            f"recipe {config.recipe} needs text: pass --data.source with a text file, or with a folder that "
            "`deqkit data prepare` made, for example `deqkit data prepare ptb --download --out DIR`"
        )
    return TextTask(open_corpus(Path(source)), config.data)


@functools.cache
def _embedded(vocab_size: int) -> Corpus:
    """Reading the standard library and learning its word pieces takes seconds, and a check opens its task often."""
    return embedded_corpus(vocab_size=vocab_size)
