"""`optrun export`: a folder that transformers loads."""

from pathlib import Path

from optrun.base.errors import EXIT_DONE, ConfigError
from optrun.base.reading import expand_home
from optrun.cli.parser import VerbArguments, VerbParser


def parser() -> VerbParser:
    """Build the parser of `optrun export RUN_DIR|CHECKPOINT DEST`.

    Its keys are merge, push_to_hub and private.
    """
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
    """Export a checkpoint, and publish it if `push_to_hub` is given.

    Prints how to load the folder, and the address on the hub.

    Returns:
        0.

    Raises:
        ConfigError: The destination exists and is not empty, or `private` is given alone.
        CheckpointError: The run has no complete checkpoint.
    """
    # 1. Refuse what cannot work, before torch is imported.
    source, target = arguments.positional
    merged = arguments.flag("merge")
    private = arguments.flag("private")
    hub_name = arguments.key_values.get("push_to_hub")
    destination = expand_home(target)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(
            f"{destination}: already exists, and nothing is overwritten. Choose a new folder."
        )
    if private is not None and hub_name is None:
        raise ConfigError(
            "optrun export private: nothing is published without push_to_hub=NAME. Give both."
        )
    from rich.console import Console

    from optrun.artifacts.target import locate
    from optrun.runner.export import export
    from optrun.runner.push import expect_hub, push

    if hub_name is not None:
        expect_hub(hub_name)
    # 2. Export, and publish.
    saved = locate(source)
    checkpoint = saved.complete_checkpoint()

    def say(line: str) -> None:
        Console().print(line, markup=False, highlight=False, soft_wrap=True)

    class_name = export(saved.run, checkpoint, destination, merged=bool(merged), note=say)
    say(f"{checkpoint} -> {destination}")
    say(f"load it with {_loading_code(class_name, destination)}")
    if hub_name is not None:
        say(f"published as {hub_name}: {push(destination, hub_name, private=private)}")
    return EXIT_DONE


def _loading_code(class_name: str, folder: Path) -> str:
    """Write the Python expression for loading an exported model."""
    if not (folder / "adapter_config.json").is_file():
        return f"transformers.{class_name}.from_pretrained({str(folder)!r})"
    return (
        f"peft.PeftModel.from_pretrained(BASE, {str(folder)!r}), where BASE is a {class_name};"
        f" {folder / 'README.md'} has the lines"
    )
