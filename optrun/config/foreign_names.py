"""Names of other trainers: what each is called here, or that it is not offered and what to do instead.

A value is a key (`lr`), a token to type (`scheduler=NAME`), or a message that begins with "not offered".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence

_BATCHES = "not offered: metrics are counted batch by batch, so that no evaluation has to fit into memory"
_LOG = "not offered: the log of a run is its optrun.log; of ranks above 0, logs/rank-N.log"
_HUB = "not offered: training publishes nothing; optrun export RUN_DIR DEST push_to_hub=NAME [private=true] does"
_DDP = "not offered: distributed=ddp looks for unused parameters by itself, and leaves the rest as torch has it"
_RANKS = "distributed=NAME training.nproc_per_node=N"
_MACHINES = "distributed=NAME distributed.nnodes=N"
_KWARGS = "not offered: an argument is a key of its own, scheduler.KEY=VALUE"
_BACKEND = "not offered: training.compile=true takes torch.compile's own defaults"
_LIGER = "not offered: the model computes as transformers has it"
_VERBS = "not offered: `optrun` trains and evaluates, `optrun evaluate RUN_DIR` evaluates alone"
_SPACE = "not offered: a space of trackio's is told to trackio itself, in the environment"
_SAME_PRECISION = "not offered: an evaluation computes as training does, in training.precision"
_WORKERS = "not offered: training.dataloader_num_workers says how many; their order is always that of the data"

TRAINING_ARGUMENTS = {
    "output_dir": "hydra.run.dir",
    "per_device_train_batch_size": "training.per_device_train_batch_size",
    "num_train_epochs": "training.num_train_epochs",
    "max_steps": "training.max_steps",
    "learning_rate": "lr",
    "lr_scheduler_type": "scheduler=NAME",
    "lr_scheduler_kwargs": _KWARGS,
    "warmup_steps": "scheduler.num_warmup_steps",
    "warmup_ratio": "scheduler.warmup_ratio",
    "optim": "optimizer=NAME",
    "optim_args": "not offered: an argument is a key of its own, optimizer.KEY=VALUE",
    "optim_target_modules": "not offered: param_groups.rules tells parameters apart, by their names",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas=[BETA1,BETA2]",
    "adam_beta2": "optimizer.betas=[BETA1,BETA2]",
    "adam_epsilon": "optimizer.eps",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "average_tokens_across_devices": "not offered: it is always so; a step counts the tokens or examples of all ranks",
    "max_grad_norm": "clip.max_norm",
    "label_smoothing_factor": "training.label_smoothing_factor",
    "bf16": "training.precision=bf16",
    "fp16": "training.precision=fp16",
    "bf16_full_eval": _SAME_PRECISION,
    "fp16_full_eval": _SAME_PRECISION,
    "tf32": "not offered: float32 is computed as torch does by itself; training.precision=bf16 is the faster",
    "activation_checkpointing": "training.gradient_checkpointing",
    "activation_checkpointing_kwargs": "not offered: training.gradient_checkpointing=true needs no arguments",
    "gradient_checkpointing": "training.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "not offered: training.gradient_checkpointing=true needs no arguments",
    "torch_compile": "training.compile",
    "torch_compile_backend": _BACKEND,
    "torch_compile_mode": _BACKEND,
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "use_cache": "not offered: training keeps no cache of keys and values",
    "neftune_noise_alpha": "not offered: embeddings are trained without added noise",
    "torch_empty_cache_steps": "not offered: torch's allocator is left alone; a smaller micro-batch with more "
    "training.gradient_accumulation_steps takes less memory",
    "auto_find_batch_size": "not offered: a batch size that is found by trial makes another run each time; give "
    "training.per_device_train_batch_size",
    "logging_strategy": "training.logging_steps",
    "logging_steps": "training.logging_steps",
    "logging_first_step": "not offered: training.logging_steps=1 logs every step",
    "log_on_each_node": "not offered: rank 0 prints and logs; each other one writes logs/rank-N.log",
    "logging_nan_inf_filter": "training.on_nonfinite",
    "include_num_input_tokens_seen": "not offered: perf/tokens_per_second stands in metrics.jsonl",
    "log_level": _LOG,
    "log_level_replica": _LOG,
    "disable_tqdm": "not offered: a bar is shown in a terminal alone, and plain lines elsewhere",
    "report_to": "tracking=NAME",
    "run_name": "run_name",
    "project": "tracking.project",
    "trackio_space_id": _SPACE,
    "trackio_bucket_id": _SPACE,
    "trackio_static_space_id": _SPACE,
    "eval_strategy": "training.eval_steps",
    "eval_steps": "training.eval_steps",
    "eval_delay": "not offered: training.eval_steps says how often, and a new run is evaluated before its first step",
    "per_device_eval_batch_size": "training.per_device_eval_batch_size",
    "prediction_loss_only": "not offered: every metric of the task is computed",
    "eval_on_start": "not offered: a new run is always evaluated before its first step",
    "eval_do_concat_batches": _BATCHES,
    "eval_use_gather_object": "not offered: ranks divide the batches of an evaluation, and what they counted is merged",
    "eval_accumulation_steps": _BATCHES,
    "include_for_metrics": _BATCHES,
    "batch_eval_metrics": _BATCHES,
    "save_only_model": "not offered: a checkpoint holds all that the next step depends on; optrun export writes the "
    "model alone",
    "save_strategy": "checkpoint.save_steps",
    "save_steps": "checkpoint.save_steps",
    "save_on_each_node": "not offered: a run has one directory, hydra.run.dir, which all machines see",
    "save_total_limit": "checkpoint.keep_last",
    "enable_jit_checkpoint": "not offered: SIGTERM always saves, and the run exits with 75",
    "push_to_hub": _HUB,
    "hub_token": "not offered: a token stays in the environment, as HF_TOKEN; nothing of it is written",
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": "not offered: optrun export RUN_DIR DEST push_to_hub=NAME makes one commit on the main branch",
    "load_best_model_at_end": "not offered: the best stays beside the last, as checkpoints/best; optrun export "
    "RUN_DIR/checkpoints/best DEST writes its model",
    "metric_for_best_model": "checkpoint.metric",
    "greater_is_better": "checkpoint.mode=max",
    "ignore_data_skip": "not offered: a resumed run goes on at the very example where it stopped",
    "restore_callback_states_from_checkpoint": "not offered: a resumed run takes up all that was saved",
    "full_determinism": "not offered: on a processor a run is the same each time; on an accelerator torch decides",
    "seed": "seed",
    "data_seed": "not offered: seed orders the data, too",
    "use_cpu": "training.device=cpu",
    "accelerator_config": "not offered: distributed=NAME says how ranks share a run; each makes its own batches",
    "parallelism_config": "not offered: distributed=fsdp has distributed.data_parallel_replicate_degree and "
    "distributed.data_parallel_shard_degree; neither tensors nor sequences are cut",
    "dataloader_drop_last": "not offered: every example is seen; a short last batch is weighted by what is in it",
    "dataloader_num_workers": "training.dataloader_num_workers",
    "dataloader_pin_memory": "not offered: memory is pinned where there is a CUDA device",
    "dataloader_persistent_workers": _WORKERS,
    "dataloader_prefetch_factor": _WORKERS,
    "dataloader_multiprocessing_context": _WORKERS,
    "dataloader_in_order": _WORKERS,
    "remove_unused_columns": "not offered: columns are found or named, data.text_column=NAME and "
    "data.label_column=NAME, and no other is used",
    "label_names": "data.label_column",
    "train_sampling_strategy": "training.group_by_length=true",
    "length_column_name": "not offered: training.group_by_length=true counts the tokens itself",
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "ddp_backend": "distributed=ddp distributed.backend=NAME",
    "ddp_timeout": "distributed.timeout_seconds",
    "fsdp": "distributed=fsdp",
    "fsdp_config": "not offered: an argument is a key of its own, distributed.KEY=VALUE with distributed=fsdp",
    "deepspeed": "not offered: distributed=fsdp cuts parameters, gradients and optimizer state over the ranks",
    "debug": "not offered: training.on_nonfinite says what happens with NaN and infinity",
    "skip_memory_metrics": "not offered: perf/peak_memory_bytes stands in metrics.jsonl",
    "do_train": _VERBS,
    "do_eval": _VERBS,
    "do_predict": "not offered: optrun predict RUN_DIR data.eval=FILE out=FILE writes a prediction for each row",
    "resume_from_checkpoint": "resume",
    "local_rank": "not offered: with distributed=NAME optrun starts the ranks, or torchrun, srun or mpirun tells each",
}
"""Every field of `transformers.TrainingArguments`, as tested."""

HABITS = {
    # Earlier fields of TrainingArguments, and the example scripts of transformers.
    "evaluation_strategy": "training.eval_steps",
    "group_by_length": "training.group_by_length",
    "no_cuda": "training.device=cpu",
    "use_mps_device": "training.device=mps",
    "overwrite_output_dir": "not offered: nothing is overwritten; hydra.run.dir=DIR chooses another directory",
    "logging_dir": "not offered: everything lies in the run directory, hydra.run.dir",
    "adafactor": "optimizer=adafactor",
    "model_name_or_path": "model.path",
    "tokenizer_name": "model.tokenizer",
    "train_file": "data.train",
    "validation_file": "data.eval",
    "dataset_name": "data.path",
    "max_seq_length": "data.max_length",
    "max_length": "data.max_length",
    "block_size": "data.max_length",
    "max_train_samples": "data.max_train_examples",
    "max_eval_samples": "data.max_eval_examples",
    "num_warmup_steps": "scheduler.num_warmup_steps",
    "early_stopping_patience": "training.early_stopping_patience",
    "early_stopping_threshold": "training.early_stopping_threshold",
    "global_batch_size": "training.global_batch_size",
    # lightning-hydra-template.
    "experiment": "not offered: a file of values is a recipe, -cn NAME --config-dir DIR, that begins with defaults: "
    "[config, _self_]",
    # torchrun.
    "nproc_per_node": "training.nproc_per_node",
    "nnodes": _MACHINES,
    # What people say for short.
    "optimizer.lr": "lr",
    "optimizer.learning_rate": "lr",
    "lr_scheduler": "scheduler=NAME",
    "epochs": "training.num_train_epochs",
    "num_epochs": "training.num_train_epochs",
    "batch_size": "training.per_device_train_batch_size",
    "train_batch_size": "training.per_device_train_batch_size",
    "eval_batch_size": "training.per_device_eval_batch_size",
    "accumulation": "training.gradient_accumulation_steps",
    "workers": "training.dataloader_num_workers",
    "num_workers": "training.dataloader_num_workers",
    # Earlier names of optrun's own.
    "data.sources": "data.mixture",
    # TRL's SFTConfig; task=causal_lm and masked_lm pack, too.
    "packing": "task.packing",
    "assistant_only_loss": "task=sft task.assistant_only_loss=VALUE",
    "completion_only_loss": "task=sft task.completion_only_loss=VALUE",
    # TRL's DPOConfig, CPOConfig and ORPOConfig.
    "loss_type": "task=preference task.loss_type=NAME",
    "beta": "task=preference task.beta=VALUE",
    "label_smoothing": "task=preference task.loss_type=robust task.label_smoothing=VALUE",
    "simpo_gamma": "task=preference task.loss_type=simpo task.simpo_gamma=VALUE",
    "disable_dropout": "task=preference task.disable_dropout=VALUE",
    "precompute_ref_log_probs": "not offered: it is always so; the log-probabilities of the start model are kept",
    "reference_free": "task=preference task.loss_type=simpo",
    "loss_weights": "not offered: task.loss_type is one loss",
    "truncation_mode": "not offered: data.max_length keeps the start of a row",
    "max_prompt_length": "data.max_length",
    "max_completion_length": "data.max_length",
    # TRL's ModelConfig and peft's LoraConfig.
    "use_peft": "adapter=lora",
    "r": "adapter=lora adapter.r=VALUE",
    "target_modules": "adapter=lora adapter.target_modules=VALUE",
    "modules_to_save": "adapter=lora adapter.modules_to_save=VALUE",
    "rank_pattern": "adapter=lora adapter.rank_pattern=VALUE",
    "alpha_pattern": "adapter=lora adapter.alpha_pattern=VALUE",
    "layers_to_transform": "adapter=lora adapter.layers_to_transform=VALUE",
    "exclude_modules": "adapter=lora adapter.exclude_modules=VALUE",
    "init_lora_weights": "adapter=lora adapter.init_lora_weights=VALUE",
    "target_parameters": "not offered: factors stand beside modules alone, not beside stacked parameters of experts",
    "lora_r": "adapter=lora adapter.r=VALUE",
    "lora_alpha": "adapter=lora adapter.lora_alpha=VALUE",
    "lora_dropout": "adapter=lora adapter.lora_dropout=VALUE",
    "lora_target_modules": "adapter=lora adapter.target_modules=VALUE",
    "lora_modules_to_save": "adapter=lora adapter.modules_to_save=VALUE",
    "use_rslora": "adapter=lora adapter.use_rslora=VALUE",
    "use_dora": "adapter=lora adapter.use_dora=VALUE",
    "torch_dtype": "model.dtype",
    "dtype": "model.dtype",
    "load_in_8bit": "model.quantization=8bit",
    "load_in_4bit": "model.quantization=4bit",
    "bnb_4bit_quant_type": "model.bnb_4bit_quant_type",
    "use_bnb_nested_quant": "model.bnb_4bit_use_double_quant",
    "bnb_4bit_use_double_quant": "model.bnb_4bit_use_double_quant",
    "bnb_4bit_compute_dtype": "model.dtype",
    # accelerate launch, PyTorch Lightning.
    "mixed_precision": "training.precision",
    "num_processes": _RANKS,
    "num_machines": _MACHINES,
    "max_epochs": "training.num_train_epochs",
    "accumulate_grad_batches": "training.gradient_accumulation_steps",
    "gradient_clip_val": "clip.max_norm",
    "gradient_clip_algorithm": "clip=NAME",
    "log_every_n_steps": "training.logging_steps",
    "val_check_interval": "training.eval_steps",
    "check_val_every_n_epoch": "training.eval_steps",
    "limit_train_batches": "data.max_train_examples",
    "limit_val_batches": "data.max_eval_examples",
    "default_root_dir": "hydra.run.dir",
    "accelerator": "training.device",
    "precision": "training.precision",
    "logger": "tracking=NAME",
    "max_time": "training.max_seconds",
    "ckpt_path": "resume",
    "devices": _RANKS,
    "num_nodes": _MACHINES,
    "strategy": "distributed=NAME",
    "deterministic": "not offered: on a processor a run is the same each time; on an accelerator torch decides",
    "fast_dev_run": "training.max_steps=1",
}

SWEEPER = {
    "n_trials": "hydra.sweeper.n_trials",
    "n_jobs": "hydra.sweeper.n_jobs",
    "storage": "hydra.sweeper.storage",
    "params": "hydra.sweeper.params",
    "search_space": "hydra.sweeper.params",
    "direction": "checkpoint.mode",
    "study_name": "not offered: the sweep directory is the study; hydra.sweep.dir=DIR names it",
    "max_failure_rate": "not offered: a failed trial ends no other; hydra.sweeper.retry_failed=true tries it again",
    "custom_search_space": "not offered: a configuration names no code; hydra.sweeper.params holds the space",
    "optuna_config.*": "not offered: its keys stand in hydra.sweeper itself, such as hydra.sweeper.n_trials",
    "sampler.seed": "hydra.sweeper.seed",
    "sampler._target_": "hydra.sweeper.sampler=NAME",
    "sampler": "hydra.sweeper.sampler=NAME",
    "sampler.*": "not offered: each sampler has Optuna's own defaults, and hydra.sweeper.seed",
}
"""Keys of hydra-optuna-sweeper below `hydra.sweeper`."""

_CLIP = "clip=global_norm clip.max_norm=NORM clip.eps=0"
_BETAS = "optimizer.betas=[BETA1,BETA2]"

OPTIMIZERS = {
    # timm, apex, nvlamb
    "max_grad_norm": _CLIP,
    "trust_clip": "optimizer.max_trust=1.0",
    "use_nvlamb": "optimizer.always_adapt=true",
    "decoupled_decay": "optimizer.weight_decay_mode=decoupled",
    "corrected_weight_decay": "optimizer.weight_decay_mode=corrected",
    "adam_w_mode": "optimizer.l2=COEFFICIENT for False; optimizer.weight_decay=COEFFICIENT for True",
    "set_grad_none": "not offered: gradients are always set to None after a step",
    # DeepSpeed
    "max_coeff": "optimizer.max_trust",
    "min_coeff": "optimizer.min_trust",
    "eps_inside_sqrt": "optimizer.eps_root=EPS optimizer.eps=0",
    # pytorch_optimizer, torch_optimizer
    "clamp_value": "optimizer.max_param_norm",
    "clamp": "optimizer.max_param_norm",
    "debias": "optimizer.bias_correction=lr",
    "adam_debias": "optimizer.bias_correction=none",
    "adam": "optimizer.exclude_from_layer_adaptation=[.]",
    "pre_norm": _CLIP,
    "weight_decouple": "optimizer.weight_decay_mode=decoupled",
    "decoupled_weight_decay": "optimizer.weight_decay_mode=decoupled",
    "fixed_decay": "optimizer.weight_decay_mode=fixed",
    "rectify": "not offered: optimizer=radam is the rectified Adam",
    # optax, Keras, TF Model Garden, Paddle
    "b1": _BETAS,
    "b2": _BETAS,
    "beta1": _BETAS,
    "beta2": _BETAS,
    "beta_1": _BETAS,
    "beta_2": _BETAS,
    "epsilon": "optimizer.eps",
    "mask": "param_groups.rules=[{pattern: NAME, weight_decay: 0}]",
    "trust_coefficient": "not offered: it is a factor on lr",
    "weight_decay_rate": "optimizer.weight_decay",
    "lamb_weight_decay": "optimizer.weight_decay",
    "exclude_from_weight_decay_fn": "optimizer.exclude_from_weight_decay",
    "global_clipnorm": _CLIP,
    "clipnorm": "clip=norm clip.max_norm=NORM clip.eps=0",
    "clipvalue": "clip=value clip.max_value=VALUE",
    "grad_clip": "clip=NAME",
    # torch
    "maximize": "not offered: a loss is minimised; to maximise a quantity, minimise its negative",
    "capturable": "not offered: no step is captured in a CUDA graph; leave it out",
    "differentiable": "not offered: no gradient flows through a step; leave it out, or take torch.optim's own class",
}
"""Keywords of other packages' optimizers, below `optimizer`."""

KNOWN = {**SWEEPER, **HABITS, **TRAINING_ARGUMENTS}


def counterpart(key: str) -> str | None:
    """Return what a name of another program is called here; None if it is not known.

    Args:
        key: As it was typed, without dashes; a name that stands below a group is known, too.

    Example:
        >>> counterpart("learning_rate"), counterpart("trainer.max_epochs")
        ('lr', 'training.num_train_epochs')
        >>> counterpart("hydra.sweeper.sampler.n_startup_trials")
        "not offered: each sampler has Optuna's own defaults, and hydra.sweeper.seed"
    """
    if key.startswith("hydra.sweeper."):
        name = key.removeprefix("hydra.sweeper.")
        found = SWEEPER.get(name) or SWEEPER.get(f"{name.split('.')[0]}.*")
    elif key.startswith("hydra."):
        return None
    elif key.startswith("optimizer.") and key.removeprefix("optimizer.") in OPTIMIZERS:
        found = OPTIMIZERS[key.removeprefix("optimizer.")]
    else:
        group, _, leaf = key.rpartition(".")
        found = KNOWN.get(key) or KNOWN.get(leaf)
        if found is not None and found.startswith("task=preference") and group not in ("", "task"):
            return None  # optimizer.beta is no key of a loss
    return None if found == key else found


def explained(found: str, written: bool = False) -> str:
    """Write a counterpart as a sentence.

    Args:
        found: What `counterpart` returned.
        written: True for an option, which is no key here.

    Example:
        >>> explained("lr"), explained("lr", written=True)
        ('Here it is called lr.', 'Here it is written lr=VALUE.')
        >>> explained("not offered: the log of a run is its optrun.log")
        'Not offered: the log of a run is its optrun.log.'
    """
    if found.startswith("not offered"):
        return f"{found[0].upper()}{found[1:]}."
    if written:
        return f"Here it is written {found if '=' in found.split(' or ')[-1] else f'{found}=VALUE'}."
    return f"Here it is called {found}."


CHOICES = {
    "task": {
        "text_classification": "task=sequence_classification",
        "classification": "task=sequence_classification",
        "regression": "task=sequence_classification task.problem_type=regression",
        "ner": "task=token_classification",
        "summarization": "task=seq2seq_lm",
        "translation": "task=seq2seq_lm",
        "seq2seq": "task=seq2seq_lm",
        "language_modeling": "task=causal_lm",
        "text_generation": "task=causal_lm",
        "clm": "task=causal_lm",
        "mlm": "task=masked_lm",
        "fill_mask": "task=masked_lm",
        "chat": "task=sft",
        "instruction_tuning": "task=sft",
        "sentence_similarity": "task=embedding",
        "feature_extraction": "task=embedding",
    },
    "scheduler": {
        "none": "scheduler=constant scheduler.num_warmup_steps=0",
        "constant_with_warmup": "scheduler=constant scheduler.num_warmup_steps=STEPS",
        "linear_with_warmup": "scheduler=linear",
        "cosine_with_warmup": "scheduler=cosine",
    },
    "adapter": {
        "peft": "adapter=lora",
        "null": "adapter=none",
    },
    "optimizer": {
        "adamw_torch": "optimizer=adamw",
        "adamw_hf": "optimizer=adamw",
        "adamw_torch_fused": "optimizer=adamw optimizer.fused=true",
    },
}
"""What choices are called elsewhere, and the words that make them here."""

NEEDED = {
    "model.path": "model=pretrained",
    "data.train": "data=files",
    "data.eval": "data=files",
    "data.path": "data=hub",
}
"""Keys that another program's option becomes, and the choice that has them."""


def other_choice(group: str, name: str) -> str | None:
    """Return the words that make what a choice of another program, a file or a hub name means; None: nobody knows.

    Example:
        >>> other_choice("model", "gpt2"), other_choice("data", "my.csv"), other_choice("task", "text-classification")
        ('model=pretrained model.path=gpt2', 'data=files data.train=my.csv', 'task=sequence_classification')
        >>> other_choice("data", "owner/name"), other_choice("clip", "max")
        ('data=hub data.path=owner/name', None)
    """
    found = CHOICES.get(group, {}).get(name.replace("-", "_"))
    if found is not None or group not in ("model", "data") or name.strip() in ("", "none", "null"):
        return found
    if group == "model":
        return f"model=pretrained {shlex.quote(f'model.path={name}')}"
    is_file = re.search(r"\.\w{1,8}$", name) is not None or name.startswith((".", "/", "~"))
    return f"data=files {shlex.quote(f'data.train={name}')}" if is_file else f"data=hub data.path={name}"


def translated(argv: Sequence[str], known: Collection[str]) -> str | None:
    """Translate a whole line of another program's options.

    Args:
        argv: As typed.
        known: Options that exist here.

    Returns:
        The words after `optrun`; None: there are fewer than two such options, or some mean nothing here.

    Example:
        >>> translated(["--learning_rate", "5e-5", "--num_train_epochs=3", "seed=1"], [])
        'lr=5e-5 training.num_train_epochs=3 seed=1'
        >>> translated(["--model_name_or_path", "gpt2", "--do_train", "--fp16"], [])
        'model=pretrained model.path=gpt2 training.precision=fp16'
    """
    found: list[str] = []
    count, at = 0, 0
    while at < len(argv):
        name, equals, value = argv[at].partition("=")
        at += 1
        if not name.startswith("--") or name in known:
            found.append(argv[at - 1])
            continue
        if not equals and at < len(argv) and not argv[at].startswith("-") and "=" not in argv[at]:
            value, at = argv[at], at + 1
        key, count = counterpart(name.lstrip("-").replace("-", "_")), count + 1
        if key is None and name.lstrip("-") not in ("lr", "seed"):
            return None
        if key is None or not key.startswith("not offered"):
            words = _written(key or name.lstrip("-"), value)
            found += [word for word in words if word not in found]
    return " ".join(found) if count > 1 else None


def _written(key: str, value: str) -> list[str]:
    """Write what an option becomes, with its value."""
    key = key.split(" or ")[0]
    words = key if "=" in key else f"{key}=VALUE"
    words = re.sub(r"=(VALUE|NAME)\b", lambda _: f"={value or 'true'}", words)
    return [*(choice for name, choice in NEEDED.items() if words.startswith(f"{name}=")), *words.split(" ")]
