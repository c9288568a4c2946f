"""Seeded batches from any step on.

The order of an epoch is a function of seed and epoch, the position inside it a function of the
step: nothing that a loader keeps in memory is needed to go on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from optrun.base.errors import OptrunError
from optrun.data.examples import Example
from optrun.data.randomness import generator

Batch = dict[str, torch.Tensor]
Transform = Callable[[Example, np.random.Generator], Example]
Key = tuple[int, int]
"""Epoch and example index: all that the randomness of an example depends on, besides the seed."""


class ExampleSource(Protocol):
    """A sequence of examples.

    It may have `lengths`, tokens of each example, and `lost`, tokens that were cut off; then
    examples can be grouped by length, and cuts are reported.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example: ...
    def fingerprint(self) -> str:
        """Digest the examples, for a resumed run to recognise its data."""
        ...


class Order(Protocol):
    """The example of each position of an epoch."""

    def __len__(self) -> int: ...
    def __getitem__(self, positions: slice, /) -> np.ndarray:
        """Shape (positions,), int64."""
        ...


class Arrangement(Protocol):
    """An order of epochs that replaces the permutation of all examples, as streams have."""

    @property
    def name(self) -> str:
        """In words; another order has another name."""
        ...

    def __call__(self, seed: int, epoch: int) -> Order:
        """Make the order of an epoch, of as many positions as there are examples.

        A pure function of both.
        """
        ...


@dataclass(frozen=True)
class EpochPlan:
    """The examples of each optimizer step.

    An epoch's last micro-batch, and its last step, may be smaller; a step never spans two epochs.
    """

    examples: int
    batch_size: int
    accumulation: int
    seed: int
    lengths: np.ndarray | None = None
    """Tokens of each example, shape (examples,): examples of like length then share a step: less
    padding."""
    arrangement: Arrangement | None = None
    """Makes the order of an epoch from seed and epoch; None: a permutation of all examples."""

    @property
    def micro_batches_per_epoch(self) -> int:
        """Micro-batches of one pass."""
        return -(-self.examples // self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass."""
        return -(-self.micro_batches_per_epoch // self.accumulation)

    def locate(self, step: int) -> tuple[int, int]:
        """Locate the epoch, and the step inside it, of optimizer step number `step` (from 0)."""
        return divmod(step, self.steps_per_epoch)

    @property
    def ordering(self) -> str:
        """How the order of an epoch is made, in words; another order has other words."""
        if self.arrangement is None:
            return "permutation"
        return self.arrangement.name

    def order(self, epoch: int) -> Order:
        """Return the order of one epoch, a function of seed and epoch; shape (examples,), int64.

        Without an `arrangement` it is a permutation. With `lengths` examples of like length share a
        step: the permutation is sorted by length inside of stretches of 50 steps, and then the
        steps are permuted, except a last incomplete one.
        """
        # 1. The order of the arrangement, a function of seed and epoch; else a permutation.
        if self.arrangement is not None:
            return self.arrangement(self.seed, epoch)
        randomness = generator(self.seed, "order", epoch)
        order = randomness.permutation(self.examples)
        if self.lengths is None:
            return order
        # 2. Sort each stretch of 50 steps by length, longest first.
        step_size = self.batch_size * self.accumulation
        stretch_size = 50 * step_size
        for begin in range(0, self.examples, stretch_size):  # the last one may be shorter
            stretch = order[begin : begin + stretch_size]
            longest_first = np.argsort(-self.lengths[stretch], kind="stable")
            order[begin : begin + stretch_size] = stretch[longest_first]
        # 3. Permute the full steps, one in each row; the rest stays at the end.
        full_steps = self.examples // step_size
        in_full_steps = full_steps * step_size
        steps = order[:in_full_steps].reshape(full_steps, step_size)
        steps = steps[randomness.permutation(full_steps)]
        return np.concatenate([steps.reshape(-1), order[in_full_steps:]])

    def steps(self, start: int) -> Iterator[list[list[Key]]]:
        """Yield the micro-batches of each step from number `start` on, without end.

        A step is a list of micro-batches, a micro-batch a list of keys. Example: with batch_size=2
        and accumulation=2 the only step of epoch 0 of three examples may be
        `[[(0, 2), (0, 0)], [(0, 1)]]`.
        """
        first_epoch, first_step = self.locate(start)
        step_size = self.accumulation * self.batch_size
        for epoch in count(first_epoch):
            order = self.order(epoch)
            for begin in range(first_step * step_size, self.examples, step_size):
                end = min(begin + step_size, self.examples)
                keys = [(epoch, int(index)) for index in order[begin:end]]
                yield [
                    keys[first : first + self.batch_size]
                    for first in range(0, len(keys), self.batch_size)
                ]
            first_step = 0  # of all later epochs

    def micro_batches(self, step: int) -> int:
        """Count the micro-batches of a step; the last step of an epoch may have fewer."""
        _, position = self.locate(step)
        return min(self.accumulation, self.micro_batches_per_epoch - position * self.accumulation)


def share_of(count: int, rank: int, ranks: int) -> list[int]:
    """Divide the micro-batches of a step, or the batches of an evaluation, among ranks.

    Every rank gets the same number of them, since a forward pass under FSDP needs all ranks. A
    number from `count` on stands for no micro-batch: the rank runs another one, which is not
    counted.

    Args:
        count: How many there are.
        rank: The rank whose numbers are returned.
        ranks: How many ranks there are.

    Example:
        >>> share_of(6, rank=0, ranks=4), share_of(6, rank=3, ranks=4)
        ([0, 4], [3, 7])
    """
    share_size = -(-count // ranks)  # rounded up
    return list(range(rank, share_size * ranks, ranks))


SOURCE = "source_number"
"""Name of the source of each example of a mixture; shape (batch,), int64."""
TEXTS = "text_hashes"
"""Name of the hashes of the texts that a batch compares; shape (batch, texts), int64."""
SCORES = "scores"
"""Name of the similarities of the pairs of texts of a batch; shape (batch,), float32."""
ASIDE = (SOURCE, TEXTS, SCORES)
"""Values of a batch that are no inputs of the model."""
LEFT_OUT = "left_out"
"""Key of an example that is left out of its batch, unless the batch has no other."""
_REFUSED = "refused"
"""Key of the error that a worker process sends in place of a refused example."""


def inputs_of(batch: Batch) -> Batch:
    """Return the inputs of the model in a batch."""
    return {name: values for name, values in batch.items() if name not in ASIDE}


def _collate_unless_refused(
    collate: Callable[[list[Example]], Batch], examples: list[Example]
) -> Batch:
    """Collate examples to a batch; if one was refused, return `{"refused": error}` instead.

    Examples marked `left_out` are dropped, except one if the batch has no other. The examples of a
    mixture have the number of their source, which the batch gets as a tensor.
    """
    refused = next((example for example in examples if _REFUSED in example), None)
    if refused is not None:
        return refused
    examples = [example for example in examples if LEFT_OUT not in example] or examples[:1]
    batch = collate(examples)
    if SOURCE in examples[0]:
        batch[SOURCE] = torch.tensor([example[SOURCE] for example in examples])
    return batch


def _raise_if_refused(batch: Batch) -> Batch:
    """Return a batch, or raise the error that a worker process sent in its place.

    Raises:
        OptrunError: One of the examples was refused.
    """
    error: object = batch.get(_REFUSED)
    if isinstance(error, OptrunError):
        raise error
    return batch


@dataclass(eq=False)
class _Keyed(Dataset[Example]):
    """Examples by epoch and index, each transformed with a random generator of its own.

    An example that is refused with an OptrunError is returned as `{"refused": error}`.
    """

    examples: ExampleSource
    transform: Transform | None
    seed: int
    stream: str
    """Purpose of the random generators."""

    def __getitem__(self, key: Key) -> Example:
        epoch, index = key
        try:
            example = self.examples[index]
            if self.transform is None:
                return example
            changed = self.transform(example, generator(self.seed, self.stream, epoch, index))
        except OptrunError as error:  # a worker process would send its traceback, no message
            return {_REFUSED: error}
        if SOURCE in example:
            return {**changed, SOURCE: example[SOURCE]}
        return changed


@dataclass
class BatchLoader:
    """Turns examples into batches."""

    examples: ExampleSource
    transform: Transform | None
    """Changes an example with a random generator of its own; None: examples stay as they are."""
    collate: Callable[[list[Example]], Batch]
    seed: int
    workers: int
    pin_memory: bool = False

    def _loader(self, batches: Iterable[list[Key]], stream: str) -> DataLoader[Example]:
        """Make a DataLoader with a collated batch for each list of keys.

        stream: The purpose of the random generators of transforms.
        """
        return DataLoader(
            _Keyed(self.examples, self.transform, self.seed, stream),
            batch_sampler=batches,
            num_workers=self.workers,
            collate_fn=partial(_collate_unless_refused, self.collate),
            pin_memory=self.pin_memory,
            worker_init_fn=_set_up_worker,
            # Forked workers inherit the closures of streams, which cannot be pickled. Python 3.14
            # no longer forks by default.
            multiprocessing_context="fork" if self.workers and sys.platform == "linux" else None,
            # Without its own generator the loader would draw from the model's.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def training(
        self, plan: EpochPlan, start: int, rank: int = 0, ranks: int = 1
    ) -> Generator[list[Batch]]:
        """Yield the micro-batches of each optimizer step, without end.

        Closing the generator ends the worker processes.

        Args:
            plan: Which examples each step sees.
            start: Number of the first step.
            rank: The rank whose share of each step is yielded, as `share_of` divides it; another
                micro-batch stands in for a missing one.
            ranks: How many ranks there are.
        """

        # 1. The keys of this rank's micro-batches, one after another, without borders between
        #    steps: worker processes prepare batches of later steps ahead.
        def keys_of_micro_batches() -> Iterator[list[Key]]:
            for micro_batches in plan.steps(start):
                for number in share_of(len(micro_batches), rank, ranks):
                    yield micro_batches[number % len(micro_batches)]  # a stand-in if none is left

        batches = iter(self._loader(keys_of_micro_batches(), "example"))
        # 2. Their batches in the same order, again as steps: the plan counts the micro-batches of a
        #    step without making them.
        try:
            for step in count(start):
                share = share_of(plan.micro_batches(step), rank, ranks)
                yield [_raise_if_refused(next(batches)) for _ in share]
        finally:
            del batches  # ends the worker processes

    def evaluation(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield batches of all examples, in order; random transforms are the same at every call.

        Args:
            batch_size: Examples of a batch.
            rank: The rank whose share of the batches is yielded, as `share_of` divides it; another
                batch stands in for a missing one.
            ranks: How many ranks there are.

        Raises:
            OptrunError: An example was refused.
        """
        # Epoch 0 at every call: transforms draw by epoch and index.
        keys = [(0, index) for index in range(len(self.examples))]
        batches = [keys[begin : begin + batch_size] for begin in range(0, len(keys), batch_size)]
        # Every rank gets the same number of batches. Numbers behind the last batch stand for none;
        # the modulo puts one of the first batches in its place, and the caller does not count it.
        share = share_of(len(batches), rank, ranks)
        batches_of_rank = [batches[number % len(batches)] for number in share]
        yield from map(_raise_if_refused, self._loader(batches_of_rank, "evaluation"))


def _set_up_worker(_: int) -> None:
    """Make a forked worker ignore SIGINT and SIGTERM, and use no threads of tokenizers.

    The main process handles signals to the process group, and needs batches until it stops. The
    threads of a tokenizer do not survive a fork, so that a call that uses them would wait for ever.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
