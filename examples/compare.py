"""Compare two optimizers: one run for each of them and each seed, then the metrics of all."""

import optrun

sweep = optrun.sweep(
    [
        "optimizer=adamw,lamb",
        "seed=0,1",
        "model.config.n_layer=1",
        "model.config.n_embd=32",
        "model.config.n_head=2",
        "data.max_train_examples=200",
        "data.max_eval_examples=20",
        "training.max_steps=6",
        "training.eval_steps=3",
        # repeated, the sweep runs what is missing, and nothing twice
        "hydra.sweep.dir=outputs/compare",
    ],
    quiet=True,
)
for run in sweep.runs:
    losses = [f"{record['eval/loss']:.3f}" for record in run.metrics if "eval/loss" in record]
    print(
        f"{run.config.optimizer.name:6} seed {run.config.seed}: evaluation loss"
        f" {' -> '.join(losses)}"
    )
