"""Go on with a run, evaluate it, and load the model of one of its checkpoints."""

import optrun

SMALL = [
    "model.config.n_layer=2",
    "model.config.n_embd=32",
    "model.config.n_head=2",
    "data.max_train_examples=400",
    "data.max_eval_examples=40",
]

run = optrun.run([*SMALL, "training.max_steps=6", "checkpoint.save_steps=3"], quiet=True).run
print("checkpoints:", ", ".join(path.name for path in run.checkpoints))

result = run.resume(
    ["training.max_steps=9"], quiet=True
)  # in the same directory, with the same configuration
print("steps:", result.summary["global_step"])
print("evaluated again:", run.evaluate()["eval/loss"])

model = run.load_model(run.checkpoints[0])
print("loaded", type(model).__name__)
