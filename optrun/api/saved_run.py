"""A run directory from Python: its content and its actions."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.api.calls import Location, caller, command_line_of, load_plugins
from optrun.api.one_call import one_call
from optrun.artifacts.metrics import read_metrics, read_summary
from optrun.artifacts.run_dir import RunDir, checkpoint_folders, read_pointer
from optrun.artifacts.saved_folder import refuse_damaged
from optrun.artifacts.target import locate
from optrun.base.errors import CheckpointError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.schema.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from optrun.runner.outcome import Outcome

log = logging.getLogger("optrun")


@dataclass(frozen=True)
class Run:
    """A run directory.

    Files are read at each access, so that it also works for a run in progress.
    """

    path: Path
    """Absolute."""

    @property
    def config(self) -> RunConfig:
        """The configuration that the run was started with, as dataclasses.

        Raises:
            ConfigError: `config.yaml` is missing or was damaged.
        """
        from optrun.config import saved, store

        path = RunDir(self.path).config
        # The file has plain values: put those of each group under its dataclass, and check types.
        return store.typed(saved.with_schemas(saved.read_config(path), str(path)))

    @property
    def summary(self) -> PlainDict:
        """The content of `summary.json`; empty if there is no file, as before the first step."""
        try:
            return read_summary(RunDir(self.path).summary)
        except FileNotFoundError:
            return {}

    @property
    def metrics(self) -> list[PlainDict]:
        """The records of `metrics.jsonl`, oldest first; an empty list if there is no file.

        Keys are `step`, `epoch`, `time` and names of metrics such as `train/loss`.
        """
        try:
            return [dict(record) for record in read_metrics(RunDir(self.path).metrics).records]
        except FileNotFoundError:
            return []

    @property
    def checkpoints(self) -> list[Path]:
        """Folders of the existing checkpoints, oldest first."""
        return checkpoint_folders(RunDir(self.path))[::-1]

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best main metric; None: there is none."""
        return read_pointer(RunDir(self.path).best)

    def load_model(self, checkpoint: Location | None = None) -> PreTrainedModel:
        """Load a model, on the CPU and in evaluation mode.

        Args:
            checkpoint: A checkpoint of this run; None: the final model, or the newest complete
                checkpoint if `model/` has no `config.json`, such as that of an unfinished run.

        Returns:
            The model; an adapter is merged into its weights.

        Raises:
            CheckpointError: The checkpoint is damaged, or transformers lacks its class.
        """
        with one_call():
            run = RunDir(self.path)
            if checkpoint is None and (run.model / "config.json").is_file():
                refuse_damaged(run.model)
                return _from_pretrained(run.model)
            from optrun.artifacts.checkpoint import read_state
            from optrun.runner.export import export

            # A checkpoint is no model folder: export it, an adapter merged, into a temporary one.
            target = locate(str(self.path if checkpoint is None else checkpoint))
            folder = target.complete_checkpoint()
            with tempfile.TemporaryDirectory(prefix="optrun-") as temporary:
                export(
                    target.run,
                    folder,
                    Path(temporary),
                    merged=read_state(folder).get("adapter") is not None,
                )
                return _from_pretrained(Path(temporary))

    def resume(self, overrides: Sequence[str] = (), *, quiet: bool = False) -> Result:
        """Continue the run in its directory, as `optrun resume=RUN_DIR`.

        Args:
            overrides: Changes, such as `training.max_steps=2000`.
            quiet: Whether nothing is printed.

        Raises:
            OptrunError: As `optrun.run` raises it; `CheckpointError` if there is no checkpoint.
        """
        from optrun.config.literal import quote_path

        command_line = command_line_of([f"resume={quote_path(self.path)}", *overrides])
        with one_call():
            from optrun.cli.train import train
            from optrun.config import store

            return result_of(train(store.open_hydra(), command_line, caller(quiet=quiet)))

    def evaluate(
        self, overrides: Sequence[str] = (), *, checkpoint: Location | None = None
    ) -> dict[str, float]:
        """Evaluate a checkpoint on the evaluation split, as `optrun evaluate`; nothing is written.

        Args:
            overrides: Changes, such as `data.eval=other.tsv`.
            checkpoint: A checkpoint of this run; None: the newest complete one.

        Returns:
            Metric name, such as `eval/loss`, -> value.

        Raises:
            ConfigError: An override does not fit, or has no effect on an evaluation.
            CheckpointError: The run has no complete checkpoint.
        """
        tokens = list(command_line_of(overrides).overrides)
        with one_call():
            from optrun.cli.evaluate import evaluate

            _, evaluation = evaluate(str(self.path if checkpoint is None else checkpoint), tokens)
        if evaluation.warning is not None:
            log.warning(evaluation.warning)
        return evaluation.metrics

    def predict(self, overrides: Sequence[str], *, checkpoint: Location | None = None) -> Path:
        """Predict the rows of a file, as `optrun predict`.

        Args:
            overrides: `data.eval=FILE`, `out=FILE`, and options such as
                `generation.max_new_tokens=40`.
            checkpoint: A checkpoint of this run; None: the newest complete one.

        Returns:
            Absolute path of the written file.

        Raises:
            ConfigError: A key has no effect on a prediction, rows do not fit, or the file exists.
            CheckpointError: The run has no complete checkpoint.
        """
        tokens = list(command_line_of(overrides).overrides)
        # Refuses a second call at the same time; restores environment, folder and Hydra after it.
        with one_call():
            from optrun.cli.predict import predict

            _, prediction = predict(str(self.path if checkpoint is None else checkpoint), tokens)
        for note in prediction.notes:
            log.info(note)
        return prediction.out.resolve()


@dataclass(frozen=True)
class Result:
    """The result of a finished run."""

    run_dir: Path
    """Absolute."""
    summary: PlainMapping = field(repr=False)
    """`summary.json` at the end of the run."""

    @property
    def exit_reason(self) -> str:
        """Why the run ended: `finished`, or the reason for an earlier stop."""
        return str(self.summary.get("message") or self.summary["status"])

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric, such as `eval/loss`."""
        return dict(self.summary["metrics"]["last"])

    @property
    def run(self) -> Run:
        """The run directory, with its metrics, checkpoints and actions."""
        return load_run(self.run_dir)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained model, on the CPU and in evaluation mode.

        Loaded when it is first asked for.
        """
        return self.run.load_model()


def load_run(path: Location, *, plugins: Sequence[Location] = ()) -> Run:
    """Open a run directory.

    Args:
        path: The run directory, or a checkpoint in it.
        plugins: Files or modules that register the choices of the run, as `--plugin` does.

    Raises:
        ConfigError: The path is neither, or a plugin cannot be loaded.
    """
    load_plugins(plugins)
    return Run(locate(str(path)).run.path.resolve())


def result_of(outcome: Outcome) -> Result:
    """Return the result of a finished run."""
    return Result(outcome.run.path.resolve(), outcome.summary)


def _from_pretrained(folder: Path) -> PreTrainedModel:
    """Load a saved model with the class that its configuration names, in evaluation mode.

    Turns off the warnings and progress bars of transformers in this process.

    Raises:
        CheckpointError: transformers has no class of this name.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    architectures = transformers.AutoConfig.from_pretrained(str(folder)).architectures or [""]
    class_name = architectures[0]
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        raise CheckpointError(
            f"{folder}: transformers has no model class {class_name!r}. Load the folder with the"
            " from_pretrained of that class."
        )
    model: PreTrainedModel = model_class.from_pretrained(str(folder))
    return model.eval()
