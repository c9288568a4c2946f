"""The verbs of the command line and the modules that run them."""

VERBS = {
    "certify": "optrun.commands.certify",
    "confirm": "optrun.commands.confirm",
    "evaluate": "optrun.commands.evaluate",
    "explain": "optrun.commands.explain",
    "export": "optrun.commands.export",
    "predict": "optrun.commands.predict",
    "report": "optrun.commands.report",
    "verify": "optrun.commands.verify",
}
