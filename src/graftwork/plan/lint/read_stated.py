"""What people write beside the settings: sizes, counts and limits that they expect of the run.

Trainers ignore these keys; the rules hold them against what follows from the settings.
"""

from graftwork.plan.lint.reading import Names, number, positive, text, yes

STATED = {
    "rows": Names(("train_rows", "train_examples", "num_train_samples", "train_samples"), positive),
    "test_rows": Names(("test_rows", "test_examples"), positive),
    "cards": Names(("num_gpus", "n_gpus", "world_size", "num_processes", "cards"), positive),
    "gpu": Names(("gpu", "gpu_type", "gpu_name"), text),
    "on_processor": Names(("use_cpu", "no_cuda"), yes),
    "ram_gib": Names(("ram_gib", "ram_gb"), number),
    "spot": Names(("spot", "use_spot", "interruptible", "use_spot_instances"), yes),
    "mirror": Names(("checkpoint_mirror", "checkpoint_s3_uri", "mirror", "hub_model_id"), text),
    "stated_batch": Names(("effective_batch_size", "effective_batch", "global_batch_size"), positive),
    "stated_epoch_steps": Names(("steps_per_epoch",), positive),
    "stated_steps": Names(("total_steps", "total_training_steps"), positive),
    "stated_weights_gb": Names(("base_model_memory_gb", "weights_gb"), number),
    "stated_memory_gb": Names(("training_memory_gb", "memory_gb"), number),
    "stated_download_gb": Names(("model_download_gb", "download_gb"), number),
    "stated_trainable": Names(("trainable_params", "trainable_parameters"), positive),
    "serving_gb": Names(("serving_memory_gb", "deploy_memory_gb"), number),
    "target_rate": Names(("target_success_rate", "success_rate"), number),
    "expected_minutes": Names(("expected_minutes",), number),
    "deadline_minutes": Names(("deadline_minutes", "session_minutes", "max_runtime_minutes"), number),
    "data_model": Names(("data_model", "logged_model", "teacher_model"), text),
    "deployed_model": Names(("deployed_model", "serving_model"), text),
    "algorithm": Names(("algorithm", "rl_algorithm"), text),
}
