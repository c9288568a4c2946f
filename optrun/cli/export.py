"""`optrun export`: a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

from optrun.base.errors import EXIT_DONE, ConfigError, did_you_mean, refuse_url
from optrun.cli.parser import VerbParser

KEYS = ("merge", "push_to_hub", "private")


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "export",
        "RUN_DIR|CHECKPOINT DEST [merge=true] [push_to_hub=NAME [private=true]]",
        """
Writes the model of a checkpoint (of a run: its newest) in save_pretrained form: config.json, model.safetensors,
tokenizer, model card. transformers.AutoModel...from_pretrained(DEST) loads it. DEST must be new or empty.
Of a run with an adapter, writes the adapter as peft does; merge=true adds it to its base, and writes the whole model.

  push_to_hub  then publish DEST as this model repository of the Hugging Face hub, NAME or OWNER/NAME, as one commit
  private      whether a repository that is made for it is; true or false
""",
        keys=KEYS,
    )


def run(argv: list[str]) -> int:
    """Export a checkpoint.

    Returns:
        0.
    """
    arguments = parser().parse(argv)
    if arguments is None:
        return EXIT_DONE
    given = arguments.values("export")
    if len(arguments.positional) != 2:
        raise ConfigError("optrun export takes a checkpoint and a destination: optrun export RUN_DIR|CHECKPOINT DEST")
    source, target = arguments.positional
    refuse_url("DEST", target)
    merged = _flag("merge", given.get("merge"))
    destination = Path(target).expanduser()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination}: is there already, and nothing is overwritten. Choose a new folder.")
    private, name_there = _flag("private", given.get("private")), given.get("push_to_hub")
    if private is not None and name_there is None:
        raise ConfigError("optrun export private: nothing is published without push_to_hub=NAME. Give both.")
    from rich.console import Console

    from optrun.runner.export import export
    from optrun.runner.push import expect_hub, push
    from optrun.runner.resume.target import checkpoint_of

    if name_there is not None:
        expect_hub(name_there)
    run_dir, checkpoint = checkpoint_of(source)

    def say(line: str) -> None:
        Console().print(line, markup=False, highlight=False, soft_wrap=True)

    name = export(run_dir, checkpoint, destination, merged=bool(merged), note=say)
    say(f"{checkpoint} -> {destination}")
    if (destination / "adapter_config.json").is_file():
        how = (
            f"peft.PeftModel.from_pretrained(BASE, {str(destination)!r}), where BASE is a {name}; "
            f"{destination / 'README.md'} has the lines"
        )
    else:
        how = f"transformers.{name}.from_pretrained({str(destination)!r})"
    Console().print(f"load it with {how}", markup=False, highlight=False, soft_wrap=True)
    if name_there is not None:
        address = push(destination, name_there, private=private)
        Console().print(f"published as {name_there}: {address}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_DONE


def _flag(key: str, text: str | None) -> bool | None:
    """Read true or false.

    Raises:
        ConfigError: Another word.
    """
    if text not in (None, "true", "false"):
        near = did_you_mean(text, ("true", "false"))
        raise ConfigError(f"optrun export {key}={text}: expected true or false. {near}")
    return None if text is None else text == "true"
