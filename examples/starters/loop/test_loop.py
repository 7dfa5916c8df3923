from pathlib import Path

from hydra import compose, initialize_config_dir
from loop import GRPOConfig, Run, TrainerDevice, grpo, make_env

from llmrl import TransformersEngine
from llmrl.config.launch import prepared, register_schemas


def test_the_loop_trains_a_tiny_model_for_two_steps():
    register_schemas()
    with initialize_config_dir(str(Path(__file__).parent / "config"), version_base=None):
        cfg = prepared(compose("grpo", ["dry_run=true", "run.path=unused"]), GRPOConfig)
    engine = TransformersEngine(cfg.model.folder)
    with Run(cfg) as run:
        grpo(cfg, run, TrainerDevice(cfg), engine, make_env(cfg), {})
        assert run.why_stopped == "all 2 steps are done"
    engine.shutdown()
