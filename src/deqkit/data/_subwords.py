"""Bytes and byte-level BPE: every text can be written, and comes back exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deqkit.data._error import DataError

NUM_BYTES = 256
_BATCH = 16  # pieces in one call: enough for the tokenizer's threads


def byte_tokenizer() -> Tokenizer:
    """The vocabulary of the 256 byte values; a byte is its own id."""
    vocab = {f"<0x{value:02X}>": value for value in range(NUM_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def learn_bpe(pieces: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE vocabulary.

    Args:
        pieces: The text to learn from, cut between pre-tokens.
        vocab_size: How many tokens to end with, the 256 bytes included; fewer if the text has no more pairs.
    """
    if vocab_size < NUM_BYTES:
        raise DataError(f"a BPE vocabulary has at least the {NUM_BYTES} bytes, got vocab_size {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def encode_bpe(tokenizer: Tokenizer, pieces: Iterable[str], *, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The ids of a text that is cut between pre-tokens, several pieces at a time."""
    remaining = iter(pieces)
    while batch := list(itertools.islice(remaining, _BATCH)):
        for encoding in tokenizer.encode_batch_fast(batch):
            yield np.array(encoding.ids, dtype=dtype)
