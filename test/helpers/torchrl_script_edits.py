"""The lines of TorchRL's training scripts that are replaced: for a machine without GPUs or the hub, and for llmrl."""

from __future__ import annotations

GRPO = ("grpo-sync.py", "grpo-async.py")
EXPERT = ("expert-iteration-sync.py", "expert-iteration-async.py")
UTILS = ("grpo_utils.py", "ei_utils.py")
ALL = (*GRPO, *EXPERT, *UTILS)
_HUB = "import hydra\nimport torchrl_hub\n\ntorchrl_hub.serve_rows(torchrl_hub.SUMS)\ntorchrl_hub.print_metrics()\n"
# (files, old, new) of what this machine lacks: GPUs, rows of the hub.
MACHINE: tuple[tuple[tuple[str, ...], str, str], ...] = (
    ((*GRPO, *EXPERT), "import hydra\n", _HUB),
    ((*GRPO, *EXPERT), "if not torch.cuda.is_available():", "if False:"),
    ((*GRPO, *EXPERT), '    torch.set_default_device("cuda:0")\n', ""),
    (GRPO, '"cuda",\n', '"cpu",\n'),
    (EXPERT, 'autocast("cuda", ', 'autocast("cpu", dtype=torch.bfloat16, '),
    (GRPO, 'torch.device(f"cuda:{devices[0]}" if devices else "cuda:0")', 'torch.device("cpu")'),
    (EXPERT, "train_device = devices[0]", 'train_device = "cpu"'),
    ((*GRPO, *EXPERT), '["num_gpus"] = device_config["ray_num_gpus"]', '["num_gpus"] = 0'),
    # A model of 135M parameters adds without thinking, or not at all.
    (UTILS, "env = GSM8KEnv(**common_kwargs", "env = GSM8KEnv(reasoning=False, **common_kwargs"),
    (UTILS, 'f"cuda:{train_devices[0]}"', '"cpu"'),
    (UTILS, 'f"cuda:{ref_devices[0]}"', '"cpu"'),
)
# (files, old, new, reason) of what llmrl has in the place of lines; the page on moving prints the reasons.
LLMRL: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (
        GRPO,
        "        device=train_device,\n",
        "",
        "the loss works on the policy's device",
    ),
    (
        EXPERT,
        '        device=torch.device(f"cuda:{train_device}")\n'
        "        if train_device is not None\n        else None,\n",
        "",
        "the loss works on the policy's device",
    ),
    (
        UTILS,
        '        device=torch.device("cuda:0"),\n',
        "",
        "`model.to(device)`",
    ),
    (
        ("ei_utils.py",),
        "            device=device,\n",
        "",
        "`model.to(device)`",
    ),
    (
        ("grpo_utils.py",),
        "import SGLangWrapper, TransformersWrapper, vLLMWrapper",
        "import TransformersWrapper, vLLMWrapper",
        "an SGLang server is an engine, `ServerEngine`",
    ),
    (
        ("grpo_utils.py",),
        "import SGLangWeightSyncScheme, VLLMWeightSyncScheme",
        "import VLLMWeightSyncScheme",
        "an SGLang server is an engine, `ServerEngine`",
    ),
    (
        ("grpo_utils.py",),
        "    tp_size = vllm_engine.get_tp_size()\n",
        "    return VLLMWeightSyncScheme()\n",
        "`VLLMWeightSyncScheme()`: the engine knows sizes and ports",
    ),
    (
        ("grpo_utils.py",),
        ", ray_backend=True)",
        ")",
        "the collector draws the rows",
    ),
    (
        ("grpo_utils.py",),
        "            use_ray_service=True,\n",
        "",
        "`ref_model_factory=` builds the model in the buffer's actor",
    ),
    (
        ("grpo_utils.py",),
        '            device=torch.device("cuda:0"),\n',
        "",
        "`ref_model_factory=` places it",
    ),
    (
        (*GRPO, *EXPERT),
        "RayLLMCollector",
        "LLMCollector",
        "`LLMCollector`: the engine's processes hold the GPUs, and the collector shares the trainer's",
    ),
    (
        (*GRPO, *EXPERT),
        "        remote_config=collector_config,\n",
        "",
        "an argument of `RayLLMCollector`",
    ),
    (GRPO, "ray_init_config=None,\n", "", "an argument of `RayLLMCollector`"),
    (GRPO, "weight_updater=None,\n", "", "an argument of `RayLLMCollector`"),
    (
        EXPERT,
        "        ray_init_config=None,  # Ray is already initialized\n"
        "        weight_updater=None,  # We'll create this after getting the remote LLM\n",
        "",
        "arguments of `RayLLMCollector`",
    ),
    (
        ("grpo-sync.py",),
        "    sender.register_collector(collector)\n",
        "",
        "the collector reads the engine's version",
    ),
    (
        ("grpo-sync.py", "expert-iteration-sync.py"),
        "        sync_iter=cfg.train.sync_iter,\n",
        "",
        "an argument of `RayLLMCollector`",
    ),
    (
        ("grpo-sync.py", *EXPERT),
        "    ray.get(collector._collector.is_initialized.remote())\n",
        "",
        "a collector is ready when it is made",
    ),
    (
        ("grpo-async.py",),
        "            ray.get(collector._collector.is_initialized.remote())\n",
        "            collector.is_initialized()\n",
        "a collector is ready when it is made",
    ),
    (
        ("grpo-async.py",),
        "        inits.append(collector._collector.is_initialized.remote())\n    ray.get(inits)\n",
        "        inits.append(collector.is_initialized())\n",
        "a collector is ready when it is made",
    ),
    (
        GRPO,
        "        ray.get(\n            train_handler.remote(\n",
        "        (\n            train(\n",
        "`train` runs in this process",
    ),
    (
        EXPERT,
        '    ray.get(\n        train_handler.remote(rb, cfg, collector, device_config["train_model_devices"])\n    )\n',
        '    train(rb, cfg, collector, device_config["train_model_devices"])\n',
        "`train` runs in this process",
    ),
    (
        ("ei_utils.py",),
        "    from torchrl.modules.llm.backends import make_vllm_worker\n",
        "    from torchrl.modules.llm import AsyncVLLM\n",
        "`AsyncVLLM.from_pretrained`",
    ),
    (
        ("ei_utils.py",),
        """    inference_server = make_vllm_worker(
        model_name=model_name,
        gpu_memory_utilization=cfg.inference_model.gpu_memory_utilization,
        num_devices=num_devices,
        devices=list(vllm_devices)
        if vllm_devices is not None
        else None,  # Convert to list for type compatibility
        make_ray_worker=make_ray_worker,
""",
        """    inference_server = AsyncVLLM.from_pretrained(
        model_name=model_name,
        gpu_memory_utilization=cfg.inference_model.gpu_memory_utilization,
        num_devices=num_devices,
""",
        "`AsyncVLLM.from_pretrained`",
    ),
    (
        GRPO,
        "partial(MCAdvantage, grpo_size=cfg.env.repeats)",
        "partial(MCAdvantage, grpo_size=cfg.env.repeats, drop_constant_groups=False)",
        "groups of equal rewards are left out unless `drop_constant_groups=False`",
    ),
)
