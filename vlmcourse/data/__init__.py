"""Data of a training run: samples, tokens, batches, and which samples each step takes."""

from vlmcourse.data.build import build_dataset
from vlmcourse.data.collate import Collator
from vlmcourse.data.sampler import GlobalBatchSampler
from vlmcourse.data.samples import IGNORE_LABEL, Batch, Message, Sample
from vlmcourse.data.tokenizer import CourseTokenizer, load_tokenizer

__all__ = [
    "IGNORE_LABEL",
    "Batch",
    "Collator",
    "CourseTokenizer",
    "GlobalBatchSampler",
    "Message",
    "Sample",
    "build_dataset",
    "load_tokenizer",
]
