"""Names of other trainers.

What each is called here, or that it is not offered and what to do instead.

A value is a key (`lr`), a token to type (`scheduler=NAME`), or a message that begins with "not
offered".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path


def _table(here: Mapping[str, str], not_offered: Mapping[str, str] | None = None) -> dict[str, str]:
    """Map each of their names to what it is here.

    Args:
        here: Their names, with blanks between, to a key or a token; `{}` in it is their name.
        not_offered: Their names to the reason.
    """
    rows = {
        **here,
        **{names: f"not offered: {reason}" for names, reason in (not_offered or {}).items()},
    }
    return {
        name: found.replace("{}", name) for names, found in rows.items() for name in names.split()
    }


SWEEPER = _table(
    {
        "direction": "checkpoint.mode",
        "n_trials n_jobs storage params": "hydra.sweeper.{}",
        "search_space": "hydra.sweeper.params",
        "sampler.seed": "hydra.sweeper.seed",
        "sampler._target_ sampler": "hydra.sweeper.sampler=NAME",
    },
    {
        "study_name": "the sweep directory is the study; hydra.sweep.dir=DIR names it",
        "max_failure_rate": (
            "a failed trial ends no other; hydra.sweeper.retry_failed=true tries it again"
        ),
        "custom_search_space": (
            "a configuration names no code; hydra.sweeper.params holds the space"
        ),
        "optuna_config.*": "its keys stand in hydra.sweeper itself, such as hydra.sweeper.n_trials",
        "sampler.*": "each sampler has Optuna's own defaults, and hydra.sweeper.seed",
    },
)
"""Keys of hydra-optuna-sweeper below `hydra.sweeper`."""

KNOWN = SWEEPER | _table(
    {
        "optimizer.lr optimizer.learning_rate learning_rate lrate": "lr",
        "seed": "seed",
        "run_name": "run_name",
        "ckpt_path resume_from_checkpoint": "resume",
        "dtype bnb_4bit_quant_type bnb_4bit_use_double_quant": "model.{}",
        "model_name_or_path": "model.path",
        "tokenizer_name": "model.tokenizer",
        "torch_dtype bnb_4bit_compute_dtype": "model.dtype",
        "load_in_8bit": "model.quantization=8bit",
        "load_in_4bit": "model.quantization=4bit",
        "use_bnb_nested_quant": "model.bnb_4bit_use_double_quant",
        "packing": "task.{}",
        "assistant_only_loss completion_only_loss": "task=sft task.{}=VALUE",
        "beta disable_dropout": "task=preference task.{}=VALUE",
        "label_smoothing": "task=preference task.loss_type=robust task.{}=VALUE",
        "simpo_gamma": "task=preference task.loss_type=simpo task.{}=VALUE",
        "loss_type": "task=preference task.loss_type=NAME",
        "reference_free": "task=preference task.loss_type=simpo",
        "max_length": "data.{}",
        "train_file": "data.train",
        "validation_file": "data.eval",
        "dataset_name": "data.path",
        "max_seq_length block_size max_prompt_length max_completion_length": "data.max_length",
        "max_train_samples limit_train_batches": "data.max_train_examples",
        "max_eval_samples limit_val_batches": "data.max_eval_examples",
        "data.sources": "data.mixture",
        "label_names label": "data.label_column",
        "text": "data.text_column",
        "test": "data.eval",
        "weight_decay": "optimizer.{}",
        "adafactor": "optimizer=adafactor",
        "optim": "optimizer=NAME",
        "adam_beta1 adam_beta2": "optimizer.betas=[BETA1,BETA2]",
        "adam_epsilon": "optimizer.eps",
        "num_warmup_steps warmup_ratio": "scheduler.{}",
        "lr_scheduler lr_scheduler_type": "scheduler=NAME",
        "warmup_steps": "scheduler.num_warmup_steps",
        "gradient_clip_val max_grad_norm": "clip.max_norm",
        "gradient_clip_algorithm": "clip=NAME",
        "group_by_length early_stopping_patience early_stopping_threshold global_batch_size nproc_per_node precision per_device_train_batch_size num_train_epochs max_steps gradient_accumulation_steps label_smoothing_factor gradient_checkpointing logging_steps eval_steps per_device_eval_batch_size dataloader_num_workers": (
            "training.{}"
        ),
        "evaluation_strategy val_check_interval check_val_every_n_epoch eval_strategy": (
            "training.eval_steps"
        ),
        "no_cuda use_cpu": "training.device=cpu",
        "use_mps_device": "training.device=mps",
        "epochs num_epochs max_epochs": "training.num_train_epochs",
        "batch_size train_batch_size bs": "training.per_device_train_batch_size",
        "eval_batch_size": "training.per_device_eval_batch_size",
        "accumulation accumulate_grad_batches": "training.gradient_accumulation_steps",
        "workers num_workers": "training.dataloader_num_workers",
        "mixed_precision": "training.precision",
        "log_every_n_steps logging_strategy": "training.logging_steps",
        "accelerator": "training.device",
        "max_time time_limit": "training.max_seconds",
        "patience": "training.early_stopping_patience",
        "fast_dev_run": "training.max_steps=1",
        "bf16": "training.precision=bf16",
        "fp16": "training.precision=fp16",
        "activation_checkpointing": "training.gradient_checkpointing",
        "torch_compile": "training.compile",
        "logging_nan_inf_filter on_nan": "training.on_nonfinite",
        "train_sampling_strategy": "training.group_by_length=true",
        "nnodes num_machines num_nodes": "distributed=NAME distributed.nnodes=N",
        "num_processes devices gpus n_gpu": "distributed=NAME training.nproc_per_node=N",
        "strategy": "distributed=NAME",
        "ddp_backend": "distributed=ddp distributed.backend=NAME",
        "ddp_timeout": "distributed.timeout_seconds",
        "fsdp": "distributed=fsdp",
        "r target_modules target_parameters modules_to_save rank_pattern alpha_pattern layers_to_transform exclude_modules init_lora_weights lora_alpha lora_dropout use_rslora use_dora": (
            "adapter=lora adapter.{}=VALUE"
        ),
        "use_peft use_lora lora": "adapter=lora",
        "lora_r rank": "adapter=lora adapter.r=VALUE",
        "lora_target_modules": "adapter=lora adapter.target_modules=VALUE",
        "lora_modules_to_save": "adapter=lora adapter.modules_to_save=VALUE",
        "save_steps": "checkpoint.{}",
        "save_strategy": "checkpoint.save_steps",
        "save_total_limit": "checkpoint.keep_last",
        "metric_for_best_model": "checkpoint.metric",
        "greater_is_better": "checkpoint.mode=max",
        "project": "tracking.{}",
        "logger report_to": "tracking=NAME",
        "wandb tensorboard mlflow": "tracking={}",
        "trust_remote_code": "model=pretrained model.{}=true",
        "n_embd n_layer n_head": "model.config.{}",
        "default_root_dir output_dir": "hydra.run.dir",
    },
    {
        "overwrite_output_dir": (
            "nothing is overwritten; hydra.run.dir=DIR chooses another directory"
        ),
        "dry_run": "optrun explain shows what a run would do, and trains nothing",
        "num_labels num_classes": "the labels are counted in the rows",
        "dropout": (
            "each architecture has names of its own, in model.config, such as"
            " model.config.resid_pdrop of gpt2"
        ),
        "logging_dir": "everything lies in the run directory, hydra.run.dir",
        "precompute_ref_log_probs": (
            "it is always so; the log-probabilities of the start model are kept"
        ),
        "loss_weights": "task.loss_type is one loss",
        "truncation_mode": "data.max_length keeps the start of a row",
        "deterministic full_determinism": (
            "on a processor a run is the same each time; on an accelerator torch decides"
        ),
        "lr_scheduler_kwargs": "an argument is a key of its own, scheduler.KEY=VALUE",
        "optim_args": "an argument is a key of its own, optimizer.KEY=VALUE",
        "optim_target_modules": "param_groups.rules tells parameters apart, by their names",
        "average_tokens_across_devices": (
            "it is always so; a step counts the tokens or examples of all ranks"
        ),
        "bf16_full_eval fp16_full_eval": (
            "an evaluation computes as training does, in training.precision"
        ),
        "tf32": (
            "float32 is computed as torch does by itself; training.precision=bf16 is the faster"
        ),
        "activation_checkpointing_kwargs gradient_checkpointing_kwargs": (
            "training.gradient_checkpointing=true needs no arguments"
        ),
        "torch_compile_backend torch_compile_mode": (
            "training.compile=true takes torch.compile's own defaults"
        ),
        "use_liger_kernel liger_kernel_config": "the model computes as transformers has it",
        "use_cache": "training keeps no cache of keys and values",
        "neftune_noise_alpha": "embeddings are trained without added noise",
        "torch_empty_cache_steps": (
            "torch's allocator is left alone; a smaller micro-batch with more "
            "training.gradient_accumulation_steps takes less memory"
        ),
        "auto_find_batch_size": (
            "a batch size that is found by trial makes another run each time; give"
            " training.per_device_train_batch_size"
        ),
        "logging_first_step": "training.logging_steps=1 logs every step",
        "log_on_each_node": "rank 0 prints and logs; each other one writes logs/rank-N.log",
        "include_num_input_tokens_seen": "perf/tokens_per_second stands in metrics.jsonl",
        "log_level log_level_replica": (
            "the log of a run is its optrun.log; of ranks above 0, logs/rank-N.log"
        ),
        "disable_tqdm": "a bar is shown in a terminal alone, and plain lines elsewhere",
        "trackio_space_id trackio_bucket_id trackio_static_space_id": (
            "a space of trackio's is told to trackio itself, in the environment"
        ),
        "eval_delay": (
            "training.eval_steps says how often, and a new run is evaluated before its first step"
        ),
        "prediction_loss_only": "every metric of the task is computed",
        "eval_on_start": "a new run is always evaluated before its first step",
        "eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics": (
            "metrics are counted batch by batch, so that no evaluation has to fit into memory"
        ),
        "eval_use_gather_object": (
            "ranks divide the batches of an evaluation, and what they counted is merged"
        ),
        "save_only_model": (
            "a checkpoint holds all that the next step depends on; optrun export writes the model"
            " alone"
        ),
        "save_on_each_node": "a run has one directory, hydra.run.dir, which all machines see",
        "enable_jit_checkpoint": "SIGTERM always saves, and the run exits with 75",
        "push_to_hub hub_private_repo hub_model_id hub_strategy hub_always_push": (
            "training publishes nothing; optrun export RUN_DIR DEST push_to_hub=NAME [private=true]"
            " does"
        ),
        "hub_token": "a token stays in the environment, as HF_TOKEN; nothing of it is written",
        "hub_revision": (
            "optrun export RUN_DIR DEST push_to_hub=NAME makes one commit on the main branch"
        ),
        "load_best_model_at_end": (
            "the best stays beside the last, as checkpoints/best; optrun export"
            " RUN_DIR/checkpoints/best DEST writes its model"
        ),
        "ignore_data_skip": "a resumed run goes on at the very example where it stopped",
        "restore_callback_states_from_checkpoint": "a resumed run takes up all that was saved",
        "data_seed": "seed orders the data, too",
        "accelerator_config": (
            "distributed=NAME says how ranks share a run; each makes its own batches"
        ),
        "parallelism_config": (
            "distributed=fsdp has distributed.data_parallel_replicate_degree and "
            "distributed.data_parallel_shard_degree; neither tensors nor sequences are cut"
        ),
        "context_parallel_degree context_parallel_size cp_size": (
            "a sequence is not cut over ranks; docs/distributed.md#long-sequences says what is"
            " missing in torch. distributed=fsdp, training.gradient_checkpointing=true and"
            " training.chunked_loss=true take less memory"
        ),
        "dataloader_drop_last": (
            "every example is seen; a short last batch is weighted by what is in it"
        ),
        "dataloader_pin_memory": "memory is pinned where there is a CUDA device",
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order": (
            "training.dataloader_num_workers says how many; their order is always that of the data"
        ),
        "remove_unused_columns": (
            "columns are found or named, data.text_column=NAME and data.label_column=NAME, and no"
            " other is used"
        ),
        "length_column_name": "training.group_by_length=true counts the tokens itself",
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph": (
            "distributed=ddp looks for unused parameters by itself, and leaves the rest as torch"
            " has it"
        ),
        "fsdp_config": (
            "an argument is a key of its own, distributed.KEY=VALUE with distributed=fsdp"
        ),
        "deepspeed": (
            "distributed=fsdp cuts parameters, gradients and optimizer state over the ranks"
        ),
        "debug": "training.on_nonfinite says what happens with NaN and infinity",
        "skip_memory_metrics": "perf/peak_memory_bytes stands in metrics.jsonl",
        "do_train do_eval": (
            "`optrun` trains and evaluates, `optrun evaluate RUN_DIR` evaluates alone"
        ),
        "do_predict": (
            "optrun predict RUN_DIR data.eval=FILE out=FILE writes a prediction for each row"
        ),
        "local_rank": (
            "with distributed=NAME optrun starts the ranks, or torchrun, srun or mpirun tells each"
        ),
    },
)
"""Those, every field of `transformers.TrainingArguments` (as tested), names of its scripts and earlier versions, of
TRL, peft, accelerate, Lightning and torchrun, and what people say for short."""

OPTIMIZERS = _table(
    {
        "trust_clip": "optimizer.max_trust=1.0",
        "use_nvlamb": "optimizer.always_adapt=true",
        "decoupled_decay weight_decouple decoupled_weight_decay": (
            "optimizer.weight_decay_mode=decoupled"
        ),
        "corrected_weight_decay": "optimizer.weight_decay_mode=corrected",
        "adam_w_mode": (
            "optimizer.l2=COEFFICIENT for False; optimizer.weight_decay=COEFFICIENT for True"
        ),
        "max_coeff": "optimizer.max_trust",
        "min_coeff": "optimizer.min_trust",
        "eps_inside_sqrt": "optimizer.eps_root=EPS optimizer.eps=0",
        "clamp_value clamp": "optimizer.max_param_norm",
        "debias": "optimizer.bias_correction=lr",
        "adam_debias": "optimizer.bias_correction=none",
        "adam": "optimizer.exclude_from_layer_adaptation=[.]",
        "fixed_decay": "optimizer.weight_decay_mode=fixed",
        "b1 b2 beta1 beta2 beta_1 beta_2": "optimizer.betas=[BETA1,BETA2]",
        "epsilon": "optimizer.eps",
        "weight_decay_rate lamb_weight_decay": "optimizer.weight_decay",
        "exclude_from_weight_decay_fn": "optimizer.exclude_from_weight_decay",
        "mask": "param_groups.rules=[{pattern: NAME, weight_decay: 0}]",
        "max_grad_norm pre_norm global_clipnorm": "clip=global_norm clip.max_norm=NORM clip.eps=0",
        "clipnorm": "clip=norm clip.max_norm=NORM clip.eps=0",
        "clipvalue": "clip=value clip.max_value=VALUE",
        "grad_clip": "clip=NAME",
    },
    {
        "set_grad_none": "gradients are always set to None after a step",
        "rectify": "optimizer=radam is the rectified Adam",
        "trust_coefficient": "it is a factor on lr",
        "maximize": "a loss is minimised; to maximise a quantity, minimise its negative",
        "capturable": "no step is captured in a CUDA graph; leave it out",
        "differentiable": (
            "no gradient flows through a step; leave it out, or take torch.optim's own class"
        ),
    },
)
"""Keywords of other packages' optimizers, below `optimizer`."""


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
        return (
            f"Here it is written {found if '=' in found.split(' or ')[-1] else f'{found}=VALUE'}."
        )
    return f"Here it is called {found}."


CHOICES = {
    "task": _table(
        {
            "text_classification classification sentiment sentiment_analysis": (
                "task=sequence_classification"
            ),
            "regression": "task=sequence_classification task.problem_type=regression",
            "ner": "task=token_classification",
            "summarization translation seq2seq": "task=seq2seq_lm",
            "language_modeling text_generation clm lm": "task=causal_lm",
            "mlm fill_mask": "task=masked_lm",
            "chat instruction_tuning": "task=sft",
            "sentence_similarity feature_extraction": "task=embedding",
            "image": "task=image_classification",
            "dpo": "task=preference task.loss_type=sigmoid",
            "ipo orpo simpo": "task=preference task.loss_type={}",
        },
        {
            "qa question_answering": (
                "no span of a text is predicted. task=seq2seq_lm writes an answer, with"
                " data.text_column and data.target_column"
            ),
            "multiple_choice swag": (
                "no list of choices is read. Write one row a choice, with the choice as"
                " data.text_pair_column and right or wrong as its label, for"
                " task=sequence_classification; or let task=sft write the right choice"
            ),
            "grpo ppo rloo online_dpo reinforce nash_md xpo gkd dapo rlhf": (
                "it generates answers while it trains, so its batches are no function of the rows,"
                " and neither an exact resume nor a verdict would hold. task=preference learns from"
                " rows (DPO, ORPO, SimPO and others); TRL has trainers that generate"
            ),
        },
    ),
    "scheduler": _table(
        {
            "none": "scheduler=constant scheduler.num_warmup_steps=0",
            "constant_with_warmup": "scheduler=constant scheduler.num_warmup_steps=STEPS",
            "linear_with_warmup": "scheduler=linear",
            "cosine_with_warmup": "scheduler=cosine",
            "cosine_with_restarts": "scheduler=cosine scheduler.num_cycles=3",
        }
    ),
    "adapter": _table({"peft": "adapter=lora", "null false": "adapter=none"}),
    "clip": _table({"null false 0 0.0": "clip=none"}),
    "checkpoint": _table({"null false no": "checkpoint=none"}),
    "tracking": _table({"null false no": "tracking=none"}),
    "distributed": _table(
        {
            "true": "distributed=ddp",
            "null false": "distributed=none",
            "deepspeed": "distributed=fsdp",
        }
    ),
    "param_groups": _table({"null none false": "param_groups=single"}),
    "optimizer": _table(
        {
            "adamw_torch adamw_hf torch.optim.adamw": "optimizer=adamw",
            "sgd_momentum": "optimizer=sgd optimizer.momentum=0.9",
            "adamw_torch_fused": "optimizer=adamw optimizer.fused=true",
        }
    ),
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
    """Return the words that make what a choice of another program, a file or a hub name means.

    None: nobody knows.

    Example:
        >>> other_choice("model", "gpt2"), other_choice("data", "my.csv"), other_choice("task", "text-classification")
        ('model=pretrained model.path=gpt2', 'data=files data.train=my.csv',
        'task=sequence_classification')
        >>> other_choice("data", "owner/name"), other_choice("clip", "max")
        ('data=hub data.path=owner/name', None)
    """
    found = CHOICES.get(group, {}).get(name.lower().replace("-", "_"))
    if found is None and group == "clip" and re.fullmatch(r"\d+(\.\d*)?", name):
        return f"clip=global_norm clip.max_norm={name}"
    if found is not None or group not in ("model", "data") or name.strip() in ("", "none", "null"):
        return found
    if group == "model":
        return f"model=pretrained {shlex.quote(f'model.path={name}')}"
    is_file = (
        re.search(r"\.\w{1,8}$", name) or name.startswith((".", "/", "~")) or Path(name).exists()
    )
    return (
        f"data=files {shlex.quote(f'data.train={name}')}"
        if is_file
        else f"data=hub data.path={name}"
    )


def translated(argv: Sequence[str], known: Collection[str]) -> str | None:
    """Translate a whole line of another program's options.

    Args:
        argv: As typed.
        known: Options that exist here.

    Returns:
        The words after `optrun`; None: there are fewer than two such options, or some mean nothing
        here.

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
    words = key if "=" in key else f"{key}=VALUE"
    words = re.sub(r"=(VALUE|NAME)\b", lambda _: f"={value or 'true'}", words)
    return [
        *(choice for name, choice in NEEDED.items() if words.startswith(f"{name}=")),
        *words.split(" "),
    ]
