"""`optrun export`: a folder that transformers loads."""

from pathlib import Path

from optrun.base.errors import EXIT_DONE, ConfigError
from optrun.cli.parser import VerbArguments, VerbParser


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "export",
        ["RUN_DIR|CHECKPOINT", "DEST"],
        """
Writes the model of a checkpoint, or of the newest one of a run, as save_pretrained does:
config.json, model.safetensors, tokenizer, model card. AutoModel...from_pretrained(DEST) loads it.
DEST must be new or empty. An adapter is written as peft does; merge=true writes the whole model
with the adapter added.

  push_to_hub  also publish DEST on the Hugging Face hub, as NAME or OWNER/NAME, in one commit
  private      true: a repository that is created for it is private
""",
        keys={"merge": "true", "push_to_hub": "NAME", "private": "true"},
    )


def run(arguments: VerbArguments) -> int:
    """Export a checkpoint.

    Returns:
        0.
    """
    source, target = arguments.positional
    merged = arguments.flag("merge")
    private = arguments.flag("private")
    destination = Path(target).expanduser()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(
            f"{destination}: already exists, and nothing is overwritten. Choose a new folder."
        )
    name_there = arguments.key_values.get("push_to_hub")
    if private is not None and name_there is None:
        raise ConfigError(
            "optrun export private: nothing is published without push_to_hub=NAME. Give both."
        )
    from rich.console import Console

    from optrun.artifacts.target import locate
    from optrun.runner.export import export
    from optrun.runner.push import expect_hub, push

    if name_there is not None:
        expect_hub(name_there)
    saved = locate(source)
    checkpoint = saved.whole_checkpoint()

    def say(line: str) -> None:
        Console().print(line, markup=False, highlight=False, soft_wrap=True)

    name = export(saved.run, checkpoint, destination, merged=bool(merged), note=say)
    say(f"{checkpoint} -> {destination}")
    if (destination / "adapter_config.json").is_file():
        how = (
            f"peft.PeftModel.from_pretrained(BASE, {str(destination)!r}), where BASE is a {name}; "
            f"{destination / 'README.md'} has the lines"
        )
    else:
        how = f"transformers.{name}.from_pretrained({str(destination)!r})"
    say(f"load it with {how}")
    if name_there is not None:
        say(f"published as {name_there}: {push(destination, name_there, private=private)}")
    return EXIT_DONE
