"""Input pipeline: documents in, global batches out.

`load_dataset` takes a `DataConfig`: files (`sources`) become documents, documents become tokens (`tokenizer`, cached by
`tokens/`), and a `Dataset` has two `parts`, for training and validation, that rows are cut from. `conversations` are
checked (`messages`) and rendered by a `chat_template`, in a process of its own (`rendering`). `train_batches` shuffles
rows by grain and makes global arrays of which each process reads its own shards. `BatchBuffers` reuses device memory.
Data sets of the Hugging Face hub are sources too, or a `Stream` whose lanes are read document by document.
"""

from zero_jax.data.batches import Batch, BatchBuffers, StreamBatches, stream_batches, train_batches, validation_batches
from zero_jax.data.dataset import DataConfig, load_dataset, token_folder_tokenizer
from zero_jax.data.documents import Piece, read_text
from zero_jax.data.parts import Dataset
from zero_jax.data.sources import Source, find_source
from zero_jax.data.stream import Stream
from zero_jax.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from zero_jax.data.tokens.cache import log_progress
from zero_jax.data.tokens.chunks import source_chunks
from zero_jax.data.tokens.store import Tokens, is_token_folder, make_tokens

__all__ = [
    "Batch",
    "BatchBuffers",
    "DataConfig",
    "Dataset",
    "Piece",
    "Source",
    "Stream",
    "StreamBatches",
    "Tokenizer",
    "Tokens",
    "find_source",
    "is_token_folder",
    "load_dataset",
    "load_tokenizer",
    "log_progress",
    "make_tokens",
    "read_text",
    "source_chunks",
    "stream_batches",
    "token_folder_tokenizer",
    "train_batches",
    "train_bpe",
    "validation_batches",
]
