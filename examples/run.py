"""Train from Python: what a run returns."""

import optrun

result = optrun.run(
    [
        "optimizer=lamb",
        "lr=2e-3",
        "model.config.n_layer=2",
        "model.config.n_embd=32",
        "model.config.n_head=2",
        "data.max_train_examples=400",
        "data.max_eval_examples=40",
        "training.max_steps=10",
    ]
)
print(f"{result.exit_reason}: {result.run_dir}")
print(f"evaluation loss {result.metrics['eval/loss']:.3f}")
print(
    f"{sum(p.numel() for p in result.model.parameters()):,} parameters in a"
    f" {type(result.model).__name__}"
)
