"""The verbs of the command line, each a module of this folder, as `optrun --help` shows them."""

VERBS = {
    "start": (
        "FILE|FOLDER|NAME [run=true]",
        "what data hold, which task and model fit, the commands to run",
    ),
    "explain": ("[KEY=VALUE ...]", "which parameter gets what, without training"),
    "evaluate": ("RUN_DIR|CHECKPOINT [...]", "metrics on the evaluation split, of other data too"),
    "predict": (
        "RUN_DIR data.eval=FILE out=FILE",
        "labels, entities, texts for the rows of a file",
    ),
    "report": ("DIR [DIR ...]", "compare runs and sweeps"),
    "confirm": (
        "DIR [seeds=5-9|difference=0.05]",
        "what a sweep chose, on fresh seeds: a verdict to quote",
    ),
    "transfer": (
        'DIR [DIR ...] to="KEY=VALUE"',
        "the lr for another size, from sweeps at smaller ones",
    ),
    "verify": ("RUN_DIR|CHECKPOINT", "is every file whole?"),
    "certify": (
        "resume [KEY=VALUE ...]",
        "kill this configuration at random, resume it, prove equality",
    ),
    "export": ("CHECKPOINT DEST", "a folder that transformers loads, or peft"),
}


def module(verb: str) -> str:
    """Name the module of a verb: it has `parser` and `run`."""
    return f"optrun.cli.{verb}"
