"""Print the facts of a configuration: summary, parameter groups, memory, schedule, data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from optrun.base.errors import printable
from optrun.base.formatting import count, list_names, plural, rate, size, span
from optrun.config.schema.metric import FEW_EXAMPLES
from optrun.explain.facts import Facts, GroupFacts, by_layer, groups_of
from optrun.explain.plot import area_plot
from optrun.task.data_check import describe_data

ROLE_STYLES = {
    "matrix": "bold",
    "head": "bold",
    "lora": "bold",
    "embedding": "cyan",
    "norm": "magenta",
    "bias": "green",
    "vector": "green",
}
PLOT_HEIGHT = 9
NARROW = 100
"""Characters of a terminal below which a table has no column of counts."""


def render(facts: Facts, console: Console) -> None:
    """Print the facts of a configuration; tables and the plot fit the width of the console."""
    table = _table(facts, console.width)
    for section in (_headline(facts), table, _memory(facts), _schedule(facts, console.width)):
        console.print()
        console.print(section)
    if facts.frozen:
        console.print(Text(f"· frozen: {list_names(facts.frozen, 3)}", style="dim"))
    for line in data_lines(facts):
        console.print(Text(printable(line)), soft_wrap=True)
    for note in facts.notes:
        console.print(Text(printable(f"· {note}"), style="dim"))


def data_lines(facts: Facts) -> list[str]:
    """Write the facts of the data, and a training example; empty if no data were sampled."""
    data = facts.data
    if data is None:
        return []
    # 1. The numbers of rows.
    line = (
        f"data   {plural(data.train_rows, 'row')} for training, {data.eval_rows:,} for evaluation"
    )
    if 0 < data.eval_rows < FEW_EXAMPLES:
        line += f" (few: one of them is {100 / data.eval_rows:.1f} %)"
    if data.facts is None:
        return ["", line]

    # 2. Facts of the rows, or of a sample of them.
    if data.looked_at != (data.train_rows, data.eval_rows):
        train_rows, eval_rows = data.looked_at
        line += f"; the figures below are of {train_rows:,} and {eval_rows:,} of them:"
    lines = ["", line, *describe_data(data.facts)]

    # 3. An example.
    if data.example is not None:
        lines += ["", "the first training row; what carries loss stands between « and »:"]
        lines += [f"  {line}" for line in data.example.splitlines()]
    return lines


def _headline(facts: Facts) -> RenderableType:
    """Lay out the facts of the whole run: model, optimizer, groups, ranks, schedule, fork."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")

    # 1. Model and optimizer.
    groups = len({tensor.group for tensor in facts.tensors})  # those with a trainable tensor
    frozen = f", {count(facts.frozen_parameters)} frozen" if facts.frozen else ""
    parameters = f"{count(facts.parameters)} trainable parameters{frozen}"
    grid.add_row("model", _with_bold_name(facts.model, f" for {facts.task}: {parameters}"))
    step = f" at lr {rate(facts.lr)}, clip {facts.clip}"
    grid.add_row("optimizer", _with_bold_name(facts.optimizer, step))
    grid.add_row("kernel", printable(facts.kernel))
    if facts.waits is not None:
        grid.add_row("waits", printable(f"each step for its loss; {facts.waits}"))
    if facts.options.get("dialect"):
        dialect = str(facts.options["dialect"])
        grid.add_row("dialect", _with_bold_name(dialect, f": {_resolved(facts.options)}"))

    # 2. Parameter groups, with a line for each rule; ranks.
    counts = f": {groups} groups, {len(facts.tensors)} tensors"
    grid.add_row("groups", _with_bold_name(facts.param_groups, counts))
    for index, rule in enumerate(facts.rules):  # the first line has the label
        grid.add_row("" if index else "rules", rule)
    memory = facts.rank_memory
    if memory is not None:
        shared = "each with the whole model"
        if memory.distributed == "fsdp":
            shared = f"a model in {memory.shards} shards"
        ranks = f": {plural(memory.ranks, 'rank')}, {shared}"
        grid.add_row("ranks", _with_bold_name(memory.distributed, ranks))

    # 3. The schedule, and what a fork takes over from its trunk.
    grid.add_row("schedule", _with_bold_name(facts.scheduler, f" {_length(facts)}"))
    if facts.branch is not None:
        fork = facts.branch
        grid.add_row(
            "branch", Text.assemble(printable(fork.folder), (f", step {fork.step:,}", "bold"))
        )
        grid.add_row("", "its weights, generators and place in the data")
        grid.add_row("", printable(f"optimizer state: {fork.optimizer_state}"))
        grid.add_row("", f"schedule: {fork.schedule}; lr of the first step {rate(fork.first_lr)}")
    return grid


def _with_bold_name(name: str, text: str) -> Text:
    """Join a name in bold and the text after it."""
    return Text.assemble((name, "bold"), text)


def _resolved(options: Mapping[str, object]) -> str:
    """Write the resolved options of a dialect, without options that are null or false.

    Example:
        >>> _resolved({"dialect": "timm", "decoupled": True, "eps": 1e-6, "bias": None})
        'decoupled=true, eps=1e-06'
    """
    texts = []
    for key, value in options.items():
        if key != "dialect" and value is not None and value is not False:
            texts.append(f"{key}={'true' if value is True else value}")
    return ", ".join(texts)


def _length(facts: Facts) -> str:
    """Describe the length of the run and of its warm-up.

    If only the data decides the length, the warm-up is written in steps or as a share of the run,
    as configured.

    Such as "over 1,000 steps, 100 of them warm-up", "over a run whose length follows from the data,
    warm-up 10%", or "over a run whose length follows from the data, warm-up 50 steps; drawn for
    1,000 steps".
    """
    warmup_steps = facts.warmup_steps
    # 1. The length is known.
    if facts.steps_from != "assumed":
        warmup = f", {warmup_steps:,} of them warm-up" if warmup_steps else ""
        return f"over {facts.steps:,} steps{warmup}"

    # 2. It is not.
    length = "over a run whose length follows from the data"
    if warmup_steps and facts.warmup_share is None:
        length += f", warm-up {warmup_steps:,} steps"
    elif warmup_steps:
        length += f", warm-up {facts.warmup_share:.0%}"
    if facts.in_steps:
        length += f"; drawn for {facts.steps:,} steps"
    return length


# -- tables
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of the table of groups: its title, the cell of a group, and the total."""

    title: str
    cell: Callable[[GroupFacts], Text]
    """Makes the cell of a group."""
    footer: str = ""
    """The total over all groups; empty: none."""
    right: bool = False
    """Whether cells are aligned on the right."""


def _decay_cell(row: GroupFacts) -> Text:
    """Show the weight decay of a group, or the range of its tensors; a dash for 0."""
    if not row.weight_decays[1]:
        return Text("–", style="dim")
    return Text(span(*row.weight_decays))


def _adapts_cell(row: GroupFacts) -> Text:
    """Show how many tensors have a trust ratio: yes for all, a dash for none."""
    if not row.adapted:
        return Text("–", style="dim")
    if row.adapted == len(row.tensors):
        return Text("yes")
    return Text(f"{row.adapted}/{len(row.tensors)}")


def _columns(facts: Facts, width: int) -> list[_Column]:
    """Choose the columns: layer, optimizer and rule only if they differ between tensors.

    Args:
        facts: The facts to show.
        width: Characters of the terminal; below `NARROW` the number of tensors is left out.
    """

    def varies(name: str) -> bool:
        return len({getattr(tensor, name) for tensor in facts.tensors}) > 1

    # 1. Which group it is.
    columns = []
    if varies("layer"):
        columns.append(_Column("layer", lambda row: Text(row.first.layer)))
    columns.append(
        _Column("role", lambda row: Text(row.first.role, ROLE_STYLES.get(row.first.role, "")))
    )
    if varies("optimizer"):
        columns.append(_Column("optimizer", lambda row: Text(row.first.optimizer)))

    # 2. What the optimizer does with it.
    columns += [
        # A range if the tensors of a group have several; red if the highest is 0: nothing learns.
        _Column(
            "peak lr",
            lambda row: Text(span(*row.lr_peaks), "" if row.lr_peaks[1] else "red"),
            right=True,
        ),
        _Column("decay", _decay_cell, right=True),
    ]
    if any(tensor.adapted is not None for tensor in facts.tensors):
        columns.append(_Column("adapts", _adapts_cell, right=True))

    # 3. How large it is, with totals.
    if width >= NARROW:
        footer = str(len(facts.tensors))
        columns.append(_Column("tensors", lambda row: Text(str(len(row.tensors))), footer, True))
    parameters = count(facts.parameters)
    columns.append(_Column("params", lambda row: Text(count(row.parameters)), parameters, True))
    state = size(facts.state_bytes)
    columns.append(_Column("state", lambda row: Text(size(row.state_bytes)), state, True))
    if varies("rule"):
        columns.append(_Column("rule", lambda row: Text(row.first.rule, style="dim")))
    return columns


def _table(facts: Facts, width: int) -> Table:
    """Tabulate the groups by layer, with a rule between layers; the last column may wrap."""
    # 1. The columns.
    columns = _columns(facts, width)
    table = Table(
        box=box.SIMPLE_HEAD,
        show_footer=True,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    for column in columns:
        footer = column.footer if table.columns else "total"
        justify: JustifyMethod = "right" if column.right else "left"
        table.add_column(
            column.title,
            footer,
            footer_style="bold",
            justify=justify,
            no_wrap=column is not columns[-1],
            overflow="fold",
        )

    # 2. A row for each group.
    group_before: GroupFacts | None = None
    for group in by_layer(groups_of(facts)):
        if group_before is not None and group_before.first.layer != group.first.layer:
            table.add_section()
        group_before = group
        table.add_row(*(column.cell(group) for column in columns))
    return table


# -- memory and schedule
# ----------------------------------------------------------------------------------------------


def _memory(facts: Facts) -> Table:
    """Tabulate the memory of weights, gradients and optimizer state, in all and of one rank.

    An unknown amount is shown as unknown, and is left out of the total.
    """
    # 1. The bytes in all, None if unknown; and, with several ranks, those of one rank as text.
    amounts = [facts.weight_bytes, facts.gradient_bytes, facts.state_bytes]
    rank = facts.rank_memory
    rank_cells: list[str] = ["", "", ""]
    rank_total = ""
    if rank is not None:
        rank_amounts = [rank.weight_bytes, rank.gradient_bytes, rank.state_bytes]
        rank_cells = [f"{size(amount)} per rank" for amount in rank_amounts]
        rank_total = f"{size(sum(filter(None, rank_amounts)))} per rank"

    # 2. A row for each, and the total, which leaves out what is unknown.
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    names = ("weights", "gradients", "optimizer")
    for name, amount, rank_cell in zip(names, amounts, rank_cells, strict=True):
        grid.add_row(name, size(amount), "", rank_cell)
    total = Text(size(sum(filter(None, amounts))), style="bold")
    note = Text(f"{facts.weight_dtype}, without activations", style="dim")
    grid.add_row("memory", total, note, Text(rank_total, style="bold"))
    return grid


def _schedule(facts: Facts, width: int) -> RenderableType:
    """Plot the learning rate over the run, of groups without a scale of their own."""
    curve = facts.curve
    lines = area_plot(
        curve.steps,
        [facts.lr * multiplier for multiplier in curve.multipliers],
        width=min(width, 100),
        height=PLOT_HEIGHT,
        top=curve.peak * facts.lr or 1.0,
        left_label="step 0" if facts.in_steps else "start",
        right_label=f"{facts.steps - 1:,}" if facts.in_steps else "end",
    )
    return Group(Text("learning rate", style="bold"), *lines)
