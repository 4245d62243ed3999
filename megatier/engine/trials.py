"""Finds out properties of a model before its first step, by forwards without gradients that change nothing.

Each trial is an evaluation, which is a pass of its own, so trials run once, before a step begins. `Engine` runs them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatier.compute.modality import evaluation_name
from megatier.engine.evaluation import evaluating
from megatier.engine.stage import UnitPlayer, learning
from megatier.engine.unit_model import Batch, UnitModel
from megatier.guards.documents import check_documents
from megatier.guards.token_rows import few_tokens
from megatier.models.decoder import check_rows_are_apart
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks


class Trials:
    """The trial forwards of one model. All ranks run them."""

    def __init__(self, model: UnitModel, player: UnitPlayer, all_ranks: Ranks | SingleRank) -> None:
        """Begin with nothing known.

        Args:
            model: the model.
            player: plays the passes of the forwards.
            all_ranks: the ranks that compute the groups of a step, or the process that computes all of them.
        """
        self._model = model
        self._player = player
        self._all_ranks = all_ranks
        self._options = model.options
        self._knows_documents = False
        """Whether the model is known to keep the documents of a row apart."""
        self._knows_batched = self._options.slices == 1
        """Whether nodes know which of their arguments are cut into slices."""

    def run(self, batch: Batch) -> None:
        """Run all trials that have not been run, with the first group of a step.

        Raises:
            UnsupportedModelError: the model does not keep documents apart, or rows that are cut.
        """
        self._find_batched_arguments(batch)
        self._try_documents(batch)
        few = few_tokens(list(batch.values()))
        self.try_tiles(lambda: self._model.loss(dict(zip(batch, few, strict=True)), None), evaluation_name(batch))

    def _find_batched_arguments(self, batch: Batch) -> None:
        """Find out, before the first step with slices, which arguments of each module are batched."""
        if self._knows_batched:
            return
        check_rows_are_apart(self._model.skeleton, "set train.slices to 1")

        # Without padding, Hugging Face gives its layers no mask. Later batches may be padded, so the last token is
        # padded here, and nodes learn whether a mask is cut.
        if "attention_mask" in batch:
            mask = batch["attention_mask"].clone()
            mask[:, -1] = 0
            batch = {**batch, "attention_mask": mask}

        # In eval mode no random number is drawn, so the next step has the same ones as in a run without slices.
        with self._model.in_eval_mode(), learning(self._model.stage):
            # What has twice as many rows in the second forward is batched (`Rows.learn`).
            for rows in (1, 2):
                few = {key: value[:rows] for key, value in batch.items()}
                with evaluating(self._model, self._player, "evaluate"):
                    self._model.loss(few, None)

        self._knows_batched = True

    def _try_documents(self, batch: Batch) -> None:
        """Check, before the first step with packed documents, that the model keeps them apart. All ranks call this.

        Raises:
            UnsupportedModelError: it does not.
        """
        if self._knows_documents or "position_ids" not in batch:
            return

        # A model with multi-dimensional position ids asks for document borders only if it is given all of their rows.
        directions = batch["position_ids"].shape[:-2]

        def run(few: Batch) -> Tensor:
            few = {**few, "position_ids": few["position_ids"].expand(*directions, -1, -1)}
            with evaluating(self._model, self._player, "documents"):
                return self._model.logits(few)

        device = self._options.device
        skeleton = self._model.skeleton
        vocab_size = skeleton.config.get_text_config().vocab_size

        # The check draws tokens, from a fork of the generator: the next step has the same random numbers as without it.
        own_rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with self._all_ranks.ending_run_on_error(), self._model.in_eval_mode(), own_rng:
            check_documents(run, batch["input_ids"][0], vocab_size, skeleton)
        self._knows_documents = True

    def try_tiles(self, run: Callable[[], object], name: str = "evaluate") -> None:
        """Find out, before the first forward with tiles of tokens, which modules can run in them. All ranks call this.

        Args:
            run: runs a forward of a few tokens.
            name: of its pass, as for `evaluating`.
        """
        if self._model.knows_tiles:
            return
        trying = self._model.trying_tiles(self._all_ranks)
        pass_of_trial = evaluating(self._model, self._player, name)
        with self._all_ranks.ending_run_on_error(), self._model.in_eval_mode(), trying, pass_of_trial:
            run()
