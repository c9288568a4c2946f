"""The verbs of the command line, as `optrun --help` shows them.

Each is a module of this folder with `parser` and `run`.
"""

VERBS = {
    "start": ("FILE|FOLDER|NAME [run=true]", "inspect data and get suggested commands"),
    "explain": ("[KEY=VALUE ...]", "lr, decay and memory of each parameter group; trains nothing"),
    "evaluate": ("RUN_DIR|CHECKPOINT [...]", "metrics of a checkpoint, also on other data"),
    "predict": ("RUN_DIR data.eval=FILE out=FILE", "predictions for the rows of a file"),
    "report": ("DIR [DIR ...]", "compare runs and sweeps"),
    "confirm": (
        "DIR [seeds=5-9|difference=0.05]",
        "rerun a sweep's winners on fresh seeds: a result to cite",
    ),
    "transfer": (
        'DIR [DIR ...] to="KEY=VALUE"',
        "predict the lr of a larger model from sweeps of smaller ones",
    ),
    "verify": ("RUN_DIR|CHECKPOINT", "are all files intact?"),
    "certify": ("resume [KEY=VALUE ...]", "kill and resume a run, and prove that nothing changed"),
    "export": ("CHECKPOINT DEST", "a folder for transformers or peft"),
}
