"""Training states, model classes and how they are placed, saved and loaded."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "base_module": ["EasyDeLBaseModule"],
        "config": ["AutoEasyDeLConfig", "EDPretrainedConfig"],
        "decoder": ["DecoderConfig", "DecoderForCausalLM"],
        "easydel_state": ["EasyDeLState"],
        "errors": [
            "ArgumentError",
            "ConfigError",
            "ConversionError",
            "NotInitializedError",
            "OptimizerError",
            "OptimizerNotFoundError",
            "ShardingError",
            "StateError",
            "TreeStructureError",
            "UnknownModelError",
        ],
        "generation": ["GenerationOutput"],
        "linen_decoder": ["LinenDecoderForCausalLM"],
        "linen_model": ["EDPretrainedModel"],
        "lora": ["LoraSettings"],
        "loss": ["LossConfig"],
        "names": [
            "EasyDeLBackends",
            "EasyDeLPlatforms",
            "EasyDeLQuantizationMethods",
            "TaskType",
        ],
        "optimizers": ["make_optimizer", "optimizer_from_description"],
        "outputs": ["CausalLMOutput"],
        "partition_axis": ["PartitionAxis"],
        "quantization": ["QuantizationSettings"],
        "router_loss": ["load_balancing_loss"],
        "run_saver": ["RunSaver"],
        "sharding": ["make_mesh"],
        "train_state": ["TrainState"],
        "train_step": ["TrainStep"],
    },
)
