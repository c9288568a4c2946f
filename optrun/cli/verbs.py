"""The verbs of the command line and the modules that run them."""

VERBS = {
    "certify": "optrun.cli.certify",
    "confirm": "optrun.cli.confirm",
    "evaluate": "optrun.cli.evaluate",
    "explain": "optrun.cli.explain",
    "export": "optrun.cli.export",
    "predict": "optrun.cli.predict",
    "report": "optrun.cli.report",
    "start": "optrun.cli.start",
    "transfer": "optrun.cli.transfer",
    "verify": "optrun.cli.verify",
}
