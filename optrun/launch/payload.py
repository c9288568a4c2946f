"""The run that is sent to ranks: composed once, sent as JSON, typed again without Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from optrun.artifacts.run_dir import RunDir
from optrun.base.plain import PlainMapping, flat
from optrun.config import saved, store
from optrun.config.registry import origins, plugins
from optrun.config.request import CommandLine, Request
from optrun.config.safety import refuse_stored_trust

if TYPE_CHECKING:
    from optrun.runner.resume.checkpoint import ResumePoint

_PATHS = ("checkpoint", "started_from")
"""Fields of a `ResumePoint` that are paths."""
_SETTLED = (
    "resume",
    "run_name",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch_size",
)
"""Keys that a resumed run may have otherwise than a new one, so that ranks are not compared by
them here. The batch is compared later, when its size is known."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """One run, in the form in which every rank receives it: plain values only."""

    command_line: PlainMapping
    values: PlainMapping
    """The configuration, resolved and plain."""
    plugins: Sequence[PlainMapping]
    """Records of the plugins that were loaded when it was composed."""
    plugins_may_change: bool
    run_dir: str
    resume: PlainMapping | None
    """A `ResumePoint`; None: from the start."""
    stop_at: int | None = None
    """Pause after this many optimizer steps."""
    quiet: bool = False
    """Whether rank 0 prints nothing."""

    @classmethod
    def of(
        cls,
        request: Request,
        run: RunDir,
        resume: ResumePoint | None,
        *,
        stop_at: int | None = None,
        quiet: bool = False,
    ) -> Self:
        """Make the payload of a composed request.

        Args:
            request: The request; paths become texts.
            run: Directory of the run; its path becomes absolute.
            resume: Where to continue; None: from the start.
            stop_at: Pause after this many optimizer steps.
            quiet: Whether rank 0 prints nothing.
        """
        point = None
        if resume is not None:
            point = asdict(resume)
            for key in _PATHS:
                if point[key] is not None:
                    point[key] = str(point[key])
        return cls(
            command_line={key: getattr(request, key) for key in CommandLine.__dataclass_fields__},
            values=dict(request.values),
            plugins=list(plugins.LOADED.values()),
            plugins_may_change=origins.changes_allowed(),
            run_dir=str(run.path.resolve()),
            resume=point,
            stop_at=stop_at,
            quiet=quiet,
        )

    def facts(self) -> dict[str, object]:
        """Map dotted names to values for comparison across ranks: configuration and plugins.

        Such as `lr`, `hydra.run.dir` (only its name: machines may mount the folder at different
        paths) and `plugin my_lion.py`, whose value is the digest of its code.
        """
        facts = {key: value for key, value in flat(self.values).items() if key not in _SETTLED}
        for record in self.plugins:
            facts[f"plugin {record.get('plugin')}"] = record.get("sha256")
        facts["hydra.run.dir"] = Path(self.run_dir).name
        return facts

    @property
    def run(self) -> RunDir:
        """The directory of the run."""
        return RunDir(self.run_dir)

    def again(self, *, saved_since: bool) -> Self:
        """Make the payload of a restart from the newest checkpoint of the run.

        Args:
            saved_since: Whether the run has saved since its first start. If not, it continues from
                the checkpoint that the user named, if any.
        """
        # The fields of a `ResumePoint`. `checkpoint` is the named one; None: the newest of the run.
        point = {"checkpoint": None, "started_from": None, **(self.resume or {})}
        if saved_since:
            point["checkpoint"] = None  # newer than a named one
        point["saved"] = bool(self.values["checkpoint"]["enabled"])
        point["notes"] = []  # the first start has shown them
        return replace(self, resume=point)

    def request(self) -> Request:
        """Build the request on this rank: load the plugins, and check the values by their schemas.

        Raises:
            ConfigError: A plugin cannot be loaded here, or has other code than when the run was
                composed; or a value does not fit its schema.
        """
        plugins.load_again(self.plugins, changes_allowed=self.plugins_may_change, start="run")
        store.register_schemas()
        cfg = saved.with_schemas(self.values, self.run_dir)
        refuse_stored_trust(cfg, self.command_line["overrides"])
        return Request(**self.command_line, config=store.typed(cfg), values=self.values)

    def resume_point(self) -> ResumePoint | None:
        """Rebuild the `ResumePoint`; None for a run from the start."""
        from optrun.runner.resume.checkpoint import ResumePoint

        if self.resume is None:
            return None
        point = dict(self.resume)
        for key in _PATHS:
            if point[key] is not None:
                point[key] = Path(point[key])
        return ResumePoint(**point)
